"""The comparison of a sweep as it is recorded: its trials, the best of them first, and those that failed.

Leaves the making to the compare step; the exit handler, the backends and the terminal read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from holdfast.spec import Spec, digest, dump_spec, parse_spec, run_id
from holdfast.store import Store, layout
from holdfast.store.json_reading import find_json

BLESSED = "blessed"
SHOWN_REASON = 200  # characters of a reason in the table


class Row(BaseModel):
    """A trial: what it changed of the spec, and what came of it."""

    changes: tuple[str, ...]
    run_id: str
    step: int
    training_loss: float
    loss: float  # on the held-out text, in nats a token
    perplexity: float
    word: str
    state_digest: str


class FailedTrial(BaseModel):
    """A trial that gave no verdict, and why."""

    changes: tuple[str, ...]
    run_id: str
    step: str  # of the DAG: train or evaluate
    exit_code: int | None  # of the table; None where nothing says it
    reason: str

    @property
    def text(self) -> str:
        """In a line for people."""
        first = next(iter(self.reason.splitlines()), "")[:SHOWN_REASON]
        code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        return f"{', '.join(self.changes)}: {self.step} failed{code}: {first}"


class Comparison(BaseModel):
    """All trials that were judged, the best one first, and those that failed, in the order of the sweep."""

    sweep_id: str
    name: str  # of the sweep
    dataset_id: str
    rows: tuple[Row, ...]
    failed: tuple[FailedTrial, ...] = ()

    @property
    def best(self) -> Row:
        """The one with the lowest loss on the held-out text among those that are blessed, or among all if none is."""
        return self.rows[0]

    @property
    def markdown(self) -> str:
        """The table for a UI. A value of a spec, and what a step said, is text there, whatever is in it."""
        lines = ["| changes | loss | perplexity | training loss | verdict | run | digest |", "|---" * 7 + "|"]
        for row in self.rows:
            figures = f"{row.loss:.4f} | {row.perplexity:.3f} | {row.training_loss:.4f} | {row.word.replace('_', ' ')}"
            lines.append(f"| {_cell(row.changes)} | {figures} | {row.run_id} | {row.state_digest[:16]} |")
        if self.failed:
            lines += ["", "| failed trial | step | exit code | reason | run |", "|---" * 5 + "|"]
        for one in self.failed:
            code = "" if one.exit_code is None else str(one.exit_code)
            reason = "<br>".join(_text(line) for line in one.reason[:SHOWN_REASON].splitlines())
            lines.append(f"| {_cell(one.changes)} | {one.step} | {code} | {reason} | {one.run_id} |")
        return "\n".join(lines) + "\n"


def sweep_name(spec: Spec) -> str:
    """What a sweep of `spec` is called."""
    return f"{spec.name}-sweep"


def sweep_id(run_ids: Sequence[str]) -> str:
    """The identity of a sweep: which runs it compares."""
    return digest(["sweep", sorted(run_ids)])


def trials_of(
    spec: Spec, trials: Sequence[Sequence[str]], dataset_id: str, salt: str = ""
) -> Iterator[tuple[tuple[str, ...], Spec, str]]:
    """What each trial changes, its spec, and its run id. Reads first weights, if the spec has any."""
    from holdfast.model.imported import weights_digest

    text = dump_spec(spec)
    for changes in trials:
        trial = parse_spec(text, changes)
        yield tuple(changes), trial, run_id(trial, dataset_id, salt, weights_digest(trial.model.init_from))


def read_comparison(store: Store, identity: str) -> Comparison | None:
    """The comparison of a sweep, if it was made."""
    key = layout.sweep(identity, "comparison.json")
    return find_json(store, key, Comparison)


def _cell(changes: Sequence[str]) -> str:
    return "<br>".join(_text(change) for change in changes)


def _text(change: str) -> str:
    return "".join(f"&#{ord(sign)};" if sign in "|<>&`*_[]\\" else sign for sign in change)
