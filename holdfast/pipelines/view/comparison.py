"""Sweeps in a store: lookup by id or name, and the comparison as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.scoring.comparison import BLESSED, Comparison, read_comparison
from holdfast.spec.errors import MissingError
from holdfast.store import Store

if TYPE_CHECKING:
    from rich.console import Console

SWEEPS = "sweeps/"
COMPARISON = "comparison.json"


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
    table = Table("", *(Column(title, overflow="fold") for title in ("changes", *found.columns, "verdict", "run")))
    for row in found.rows:
        mark = "best" if blessed and row == found.best else ""
        table.add_row(mark, "\n".join(row.changes), *row.shown, row.word.replace("_", " "), row.run_id)
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
