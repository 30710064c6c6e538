"""Comparisons: of the trials of a sweep as a table, and of runs on one page, a file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.pages import Chart, Series, draw_chart, number, points, render
from holdfast.pipelines.documents import write_whole
from holdfast.pipelines.view.audit import flatten
from holdfast.pipelines.view.run_record import RunRecord
from holdfast.scoring.comparison import BLESSED, Comparison, read_comparison
from holdfast.spec.errors import MissingError
from holdfast.store import Store
from holdfast.store.parallel import in_parallel
from holdfast.telemetry import Row, read_history

if TYPE_CHECKING:
    from rich.console import Console

SWEEPS = "sweeps/"
COMPARISON = "comparison.json"
KINDS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")  # colors of the drawn runs
CURVES = {
    "loss": "Training loss, nats a token",
    "evaluation.loss": "Held-out loss while training, nats a token",
    "grad_norm": "Gradient norm",
    "learning_rate": "Learning rate",
    "tokens_per_second": "Throughput, tokens a second",
}
NARROW = 20  # characters of a change that is not broken: the table then fits 80 columns


def find_comparison(store: Store, wanted: str) -> Comparison:
    """The comparison of the sweep whose id begins with `wanted`, or the newest one with that name.
    Raises MissingError.
    """
    infos = [info for info in store.list(SWEEPS) if info.key.endswith(f"/{COMPARISON}")]
    ids = [info.key.removeprefix(SWEEPS).partition("/")[0] for info in sorted(infos, key=lambda info: -info.modified)]
    matches = [candidate for candidate in ids if wanted and candidate.startswith(wanted)]
    if len(matches) > 1:
        raise MissingError(f"{wanted!r}: names {len(matches)} sweeps; write more of the id")
    for identity in matches or ids:
        comparison = read_comparison(store, identity)
        if comparison is not None and (matches or comparison.name == wanted):
            return comparison
    id_text = ", ".join(ids[:5]) or "none"
    raise MissingError(f"{wanted!r}: no comparison of a sweep in {store.url} has that id or name; there are: {id_text}")


def print_comparison(console: Console, found: Comparison, store: Store) -> None:
    """Print the comparison as a table, the best trial first, and the failed trials below it."""
    from rich.table import Column, Table

    blessed = found.best.word == BLESSED
    fields = {change.partition("=")[0] for row in found.rows for change in row.changes}
    changes = [[_shortened(change, fields) for change in row.changes] for row in found.rows]
    is_narrow = max((len(change) for row in changes for change in row), default=0) <= NARROW
    table = Table(
        "", Column("changes", overflow="fold", no_wrap=is_narrow), box=None, pad_edge=False, header_style="dim"
    )
    for title in (*found.columns, "verdict"):
        table.add_column(title, overflow="fold")
    table.add_column("run", no_wrap=True)
    for row, changes_of_row in zip(found.rows, changes, strict=True):
        mark = "best" if blessed and row == found.best else ""
        table.add_row(mark, "\n".join(changes_of_row), *row.shown, row.word.replace("_", " "), row.run_id[:8])
    console.print(table, markup=False, highlight=False)
    if not blessed:
        console.print("no trial is blessed, so none is the best, and none is registered", highlight=False)
    for rung in found.rungs:
        console.print(f"rung {rung.steps} steps: {rung.trials} trials, {rung.promoted} promoted", highlight=False)
    for stopped in found.stopped:
        console.print(f"not promoted: {stopped.text}", markup=False, highlight=False, soft_wrap=True)
    for trial in found.failed:
        console.print(f"failed: {trial.text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"sweep {found.sweep_id} in {store.url}/sweeps/{found.sweep_id}/", highlight=False, soft_wrap=True)


def _shortened(change: str, fields: Set[str]) -> str:
    """A change with the shortest end of the field's name that no other one of the `fields` has."""
    field, equals, value = change.partition("=")
    parts = field.split(".")
    ends = (".".join(parts[first:]) for first in reversed(range(len(parts))))
    end = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in fields) == 1), field)
    return f"{end}{equals}{value}"


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
