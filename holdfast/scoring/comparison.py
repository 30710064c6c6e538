"""The recorded comparison of a sweep: its trials, best first, and its failed trials.

The compare step makes it; the exit handler, the backends and the terminal read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from holdfast.spec import Spec, digest, run_id
from holdfast.spec.json_parsing import parse_json
from holdfast.store import Store, layout
from holdfast.store.json_reading import find_json

BLESSED = "blessed"
SHOWN_REASON = 200  # characters of a reason that the table shows


class Row(BaseModel):
    """A trial: its changes to the spec, and its results."""

    changes: tuple[str, ...]
    run_id: str
    step: int
    training_loss: float | None  # None: a script that reported none
    loss: float | None = None  # on held-out text, in nats per token; None: a script
    perplexity: float | None = None
    metric: str = ""  # of a script: the metric that ranks its trials
    value: float | None = None  # of that metric; None: not finite
    word: str
    state_digest: str

    @property
    def figures(self) -> dict[str, float]:
        """Its figures by name, the one that ranks trials first."""
        named = {"loss": self.loss, "perplexity": self.perplexity, "training_loss": self.training_loss}
        named = {self.metric: self.value, **named} if self.metric else named
        return {name: value for name, value in named.items() if value is not None}

    @property
    def shown(self) -> tuple[str, ...]:
        """Its figures as text, in the order of `Comparison.columns`."""
        if self.metric:
            return _number(self.value), _number(self.training_loss)
        return _number(self.loss), _number(self.perplexity, 3), _number(self.training_loss)


class FailedTrial(BaseModel):
    """A trial without a verdict, and the reason."""

    changes: tuple[str, ...]
    run_id: str
    step: str  # step of the DAG: train or evaluate
    exit_code: int | None  # from the table of exit codes; None where it is unknown
    reason: str

    @property
    def text(self) -> str:
        """One line for people."""
        first = next(iter(self.reason.splitlines()), "")[:SHOWN_REASON]
        code = "" if self.exit_code is None else f" (exit code {self.exit_code})"
        return f"{', '.join(self.changes)}: {self.step} failed{code}: {first}"


class StoppedTrial(BaseModel):
    """A trial that a search did not promote."""

    changes: tuple[str, ...]
    run_id: str
    step: int  # of its last score
    loss: float | None  # held out, in nats per token; None: not finite

    @property
    def text(self) -> str:
        """One line for people."""
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        return f"{', '.join(self.changes)}: stopped at step {self.step}, loss {loss}"


class Rung(BaseModel):
    """A budget of a search by ASHA."""

    steps: int
    trials: int  # that were scored at it, failed ones included
    promoted: int


class Comparison(BaseModel):
    """All judged trials, best first, and the failed ones in the order of the sweep."""

    sweep_id: str
    name: str  # name of the sweep
    dataset_id: str
    rows: tuple[Row, ...]
    failed: tuple[FailedTrial, ...] = ()
    stopped: tuple[StoppedTrial, ...] = ()  # of a search, in its order
    rungs: tuple[Rung, ...] = ()

    @property
    def best(self) -> Row:
        """The blessed trial with the lowest held-out loss, or the lowest of all if none is blessed. Trials of a script
        are ranked by its first metric."""
        return self.rows[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the figures of its rows."""
        metric = self.rows[0].metric
        return (metric, "training loss") if metric else ("loss", "perplexity", "training loss")

    @property
    def markdown(self) -> str:
        """The table for a UI. Spec values and messages of steps are escaped, so they stay plain text."""
        columns = ("changes", *map(_text, self.columns), "verdict", "run", "digest")
        lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for row in self.rows:
            figures = " | ".join((*row.shown, row.word.replace("_", " ")))
            lines.append(f"| {_cell(row.changes)} | {figures} | {row.run_id} | {row.state_digest[:16]} |")
        if self.failed:
            lines += ["", "| failed trial | step | exit code | reason | run |", "|---" * 5 + "|"]
        for trial in self.failed:
            code = "" if trial.exit_code is None else str(trial.exit_code)
            reason = "<br>".join(_text(line) for line in trial.reason[:SHOWN_REASON].splitlines())
            lines.append(f"| {_cell(trial.changes)} | {trial.step} | {code} | {reason} | {trial.run_id} |")
        if self.rungs:
            lines += ["", "| rung | trials | promoted |", "|---" * 3 + "|"]
            lines += [f"| {rung.steps} steps | {rung.trials} | {rung.promoted} |" for rung in self.rungs]
            lines += ["", "| stopped trial | step | loss | run |", "|---" * 4 + "|"]
        for stopped in self.stopped:
            loss = "" if stopped.loss is None else f"{stopped.loss:.4f}"
            lines.append(f"| {_cell(stopped.changes)} | {stopped.step} | {loss} | {stopped.run_id} |")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class TrialList:
    """The trials that a step gets: the overrides of each, and the id of the search; empty for a grid."""

    trials: list[list[str]]
    search: str = ""

    @classmethod
    def from_text(cls, text: str) -> TrialList:
        """Read what `holdfast.pipelines.trials.text_of` wrote. Raises DataError."""
        if text.lstrip().startswith("{"):
            return parse_json(text, cls, "--trials")
        return cls(parse_json(text, list[list[str]], "--trials"))


def sweep_name(spec: Spec) -> str:
    """The name of a sweep of `spec`."""
    return f"{spec.name}-sweep"


def sweep_id(run_ids: Sequence[str]) -> str:
    """The id of a sweep: a digest of the runs that it compares."""
    return digest(["sweep", sorted(run_ids)])


def trials_of(
    spec: Spec, trials: Sequence[Sequence[str]], dataset_id: str, salt: str = ""
) -> Iterator[tuple[tuple[str, ...], Spec, str]]:
    """The changes, spec and run id of each trial. Reads the first weights if the spec has any."""
    from holdfast.model.hub import first_weights_digest

    for changes in trials:
        trial = spec.with_overrides(changes)
        yield tuple(changes), trial, run_id(trial, dataset_id, salt, first_weights_digest(trial))


def read_comparison(store: Store, identity: str) -> Comparison | None:
    """The comparison of a sweep; None if it does not exist."""
    key = layout.sweep(identity, "comparison.json")
    return find_json(store, key, Comparison)


def _number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _cell(changes: Sequence[str]) -> str:
    return "<br>".join(_text(change) for change in changes)


def _text(change: str) -> str:
    return "".join(f"&#{ord(sign)};" if sign in "|<>&`*_[]\\" else sign for sign in change)
