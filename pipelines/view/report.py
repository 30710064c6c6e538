"""The tables of runs and of models, and the page of one run: `holdfast runs`, `holdfast models`, `holdfast show`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.components.runtime.environment import log_dir
from holdfast.components.spec.plan import Segment, changes_in_words
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import read_events
from holdfast.pipelines.view.catalog import RunRecord
from holdfast.pipelines.view.summary import figures, model_place, next_commands, outcome, reasons, report_place
from holdfast.pipelines.view.timeline import timeline

if TYPE_CHECKING:
    from holdfast.components.tracking import Champion

WIDE = 120  # columns when the output is not a terminal: nothing is cut short in a file or a pipe


def print_runs(records: Sequence[RunRecord], store_url: str) -> None:
    """Print the table of runs, newest first."""
    console = _console()
    if not records:
        console.print(f"No runs in {store_url} yet. Start one: holdfast run examples/quickstart.yaml", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("run", "name", "state", "step", "loss", "verdict", "version", "when"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("step", "loss") else "left")
    for record in records:
        table.add_row(
            record.run_id,
            escape(record.name),
            record.state,
            f"{record.step}/{record.steps}" if record.steps else str(record.step),
            "" if record.loss is None else f"{record.loss:.4f}",
            record.word.replace("_", " "),
            escape(record.model_version),
            ago(time.time() - record.changed),
        )
    console.print(table)


def print_models(versions: Sequence[tuple[Champion, Sequence[str]]]) -> None:
    """Print the table of registered models."""
    console = _console()
    if not versions:
        console.print("No registered models yet. A run whose model passes its evaluation registers one.")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("model", "version", "alias", "run", "loss", "perplexity", "when"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("version", "loss", "perplexity") else "left")
    for version, aliases in versions:
        loss, perplexity = (version.metrics.get(name) for name in ("loss", "perplexity"))
        table.add_row(
            escape(version.model),
            str(version.version),
            escape(", ".join(aliases)),
            version.run_id,
            f"{loss:.4f}" if isinstance(loss, int | float) else "",
            f"{perplexity:.4g}" if isinstance(perplexity, int | float) else "",
            ago(time.time() - version.created),
        )
    console.print(table)


def print_run(record: RunRecord, store: Store) -> None:
    """Print everything there is to say about a run, its spec last."""
    console = _console()
    for label, value in _facts(record, store):
        console.print(f"[dim]{label:<11}[/dim] {escape(value)}", highlight=False, soft_wrap=True)
    happened = list(timeline(read_events(store, record.run_id)))
    if happened:
        console.print("\n[dim]what happened[/dim]")
    for when, who, what in happened:
        console.print(f"[dim]{when}  {escape(who):<10}[/dim] {escape(what)}", highlight=False, soft_wrap=True)
    if record.spec:
        console.print("\n[dim]spec[/dim]")
        console.print(yaml.safe_dump(record.spec, sort_keys=False), markup=False, highlight=False, soft_wrap=True)


def ago(seconds: float) -> str:
    """How long ago, roughly."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _facts(record: RunRecord, store: Store) -> Iterator[tuple[str, str]]:
    yield "run", record.run_id
    yield "name", record.name
    yield "state", outcome(record)
    yield "dataset", record.dataset_id
    if salt := record.described.get("salt"):
        yield "salt", str(salt)
    yield "step", f"{record.step} of {record.steps}, in {record.attempts} attempt{'s' if record.attempts != 1 else ''}"
    for index, line in enumerate(_plans(record, store)):
        yield ("plan" if index == 0 else ""), line
    if record.checkpoints:
        yield "checkpoints", ", ".join(str(step) for step in sorted(record.checkpoints))
    if record.result is not None:
        yield "figures", figures(record)
        yield "model", model_place(store, record)
    for index, reason in enumerate(reasons(record)):
        yield ("why" if index == 0 else ""), reason
    if record.verdict is not None:
        yield "report", report_place(store, record)
    logs = sorted(log_dir(record.run_id).glob("run-*.log"))
    if logs:
        yield "log", str(logs[-1])
    yield "changed", time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(record.changed))
    if record.result is not None:
        for index, command in enumerate(next_commands(store, record)):
            yield ("next" if index == 0 else ""), command


def _plans(record: RunRecord, store: Store) -> Iterator[str]:
    """The plans that the run was computed under, one a line: of the result, else of the newest checkpoint."""
    said = record.result
    if said is None and record.checkpoints:
        said = json.loads(store.get(layout.checkpoint(record.run_id, max(record.checkpoints))))
    segments = [Segment.model_validate(each) for each in (said or {}).get("segments", [])]
    for segment, changes in zip(segments, changes_in_words(segments), strict=True):
        yield f"from step {segment.from_step}: {'; '.join(changes) or segment.plan.summary}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
