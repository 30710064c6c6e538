"""`holdfast runs compare`: one page that compares runs, a file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.pages import Chart, Series, draw_chart, number, points, render
from holdfast.pipelines.documents import write_whole
from holdfast.pipelines.view.audit import flatten
from holdfast.pipelines.view.catalog import RunRecord
from holdfast.store import Store
from holdfast.store.parallel import in_parallel
from holdfast.telemetry import Row, read_history

KINDS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")  # colors of the drawn runs
CURVES = {
    "loss": "Training loss, nats a token",
    "evaluation.loss": "Held-out loss while training, nats a token",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Throughput, tokens a second",
}


def write_page(store: Store, records: Sequence[RunRecord], path: Path) -> Path:
    """Write the page of these runs. Returns its path. Raises as `write_whole`."""
    write_whole(path, draw_runs(store, records))
    return path.absolute()


def draw_runs(store: Store, records: Sequence[RunRecord]) -> str:
    """The page of these runs, in their order. The curves are those of the first runs, one color each."""
    drawn = records[: len(KINDS)]
    histories = in_parallel(lambda record: read_history(store, record.run_id), drawn)
    lines = list(zip(drawn, KINDS, histories, strict=False))
    charts = [_chart(name, title, lines) for name, title in CURVES.items()]
    metrics = list(dict.fromkeys(name for record in records for name in _metrics(record)))
    kinds = [*KINDS[: len(drawn)], *[""] * (len(records) - len(drawn))]
    return render(
        "runs.html",
        store=store.url,
        metrics=metrics,
        names=[record.run_id[:8] for record in records],
        records=[
            (record, kind, [_figure(_metrics(record).get(name)) for name in metrics])
            for record, kind in zip(records, kinds, strict=True)
        ],
        curves=[(chart, draw_chart(chart)) for chart in charts if chart.series],
        differences=differences_of(records),
    )


def differences_of(records: Sequence[RunRecord]) -> list[tuple[str, list[Any]]]:
    """The fields of the specs that are not equal in all runs, with the value of each run."""
    specs = [{**dict(flatten(record.spec)), "dataset": record.dataset_id} for record in records]
    rows = (
        (name, [spec.get(name, "not set") for spec in specs]) for name in dict.fromkeys(key for s in specs for key in s)
    )
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _chart(name: str, title: str, lines: Sequence[tuple[RunRecord, str, Sequence[Row]]]) -> Chart:
    series = [Series(f"{record.name} {record.run_id[:8]}", _points(rows, name), kind) for record, kind, rows in lines]
    return Chart(title, [one for one in series if one.points], height=300 if name == "loss" else 190)


def _points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """The points of a curve. A score belongs to the step that was scored, not to the step of its row."""
    if not name.startswith("evaluation."):
        return points(rows, name)
    return [(row["evaluation.step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _metrics(record: RunRecord) -> dict[str, Any]:
    metrics = (record.verdict or {}).get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _figure(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else ""
