"""The one protocol of everything that can run the DAG: this machine, Kubeflow, Argo, Slurm, Ray.

Promises of every backend: submitting the same thing again gives the run that is there; a run is named by the backend's
own id, by Holdfast's run id or its beginning, or by the name of its spec; nothing is printed here. A backend renders
the DAG of `holdfast.pipelines.table` and has none of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.pipelines.backends.request import RunRequest
from holdfast.spec.errors import ExitCode, MissingError
from holdfast.steps import STEPS

PENDING, RUNNING, SUCCEEDED, FAILED, CANCELED = "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELED"
NOT_BEGUN = "NOT_BEGUN"  # of a step, once its run has ended without it
SHOWN_IDS = 8  # candidates in an error
SKIPPED = "skipped"  # how the outcome of a step begins whose condition did not hold
UNFINISHED = (PENDING, RUNNING, "PAUSED", "CANCELING")


@dataclass(frozen=True)
class StepStatus:
    """A step of a run, as the backend sees it."""

    name: str
    state: str
    seconds: float | None = None  # how long it took, or has been running
    error: str = ""
    pods: tuple[str, ...] = ()  # one for each try, oldest first; none on one machine
    exit_code: int | None = None  # of the table, once it has ended; None where nobody knows it


@dataclass(frozen=True)
class RunStatus:
    """A run, as the backend sees it. Listings leave the steps out."""

    backend: str
    id: str  # the backend's own
    name: str
    state: str  # one of those above, or a word of the backend's
    link: str = ""  # where a person looks at it
    message: str = ""  # why it failed
    steps: tuple[StepStatus, ...] = ()
    exit_code: int | None = None  # of the table: how it ended; None while it goes on, and where nobody knows it
    job: str = ""  # what its steps call it, where that is not the id

    @property
    def unfinished(self) -> bool:
        """Whether it may still change."""
        return self.state in UNFINISHED


def ended_with(state: str, steps: Iterable[StepStatus] = ()) -> int | None:
    """The exit code of a run in `state`: that of the first of its `steps` that did not succeed."""
    if state == SUCCEEDED:
        return int(ExitCode.OK)
    if state in UNFINISHED:
        return None
    return next((step.exit_code for step in steps if step.exit_code), None)


def step_called(name: str) -> str:
    """The step that something is called after: itself, or that of one trial, such as `train-2`."""
    step, _, number = name.rpartition("-")
    return step if number.isdecimal() and step in STEPS and STEPS[step].per_trial else name


def is_step(wanted: str, name: str) -> bool:
    """Whether the step `name` is the one that a person asks for: none is any, and one without a number is that of all
    trials."""
    return wanted in ("", name, step_called(name))


def require_one_run(wanted: str, run_ids: Iterable[str]) -> None:
    """Refuse the beginning of an id that several runs share: nobody wants to end another run than the one that was
    meant. Raises MissingError."""
    found = sorted(set(run_ids))
    if len(found) > 1:
        shown = ", ".join(found[:SHOWN_IDS]) + (f" and {len(found) - SHOWN_IDS} more" if len(found) > SHOWN_IDS else "")
        raise MissingError(f"{wanted!r}: names several runs: {shown}; write more of the id")


class Backend(Protocol):
    """What runs the DAG."""

    name: str

    def objects(self, request: RunRequest) -> list[dict[str, Any]]:
        """The very objects that `submit` would send, none of which is sent: the dry run."""

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """The run of `order`, and whether it was made now: one that has not ended or has succeeded is kept."""

    def status(self, run: str) -> RunStatus:
        """What became of a run, with its steps. Raises MissingError."""

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """(step, line) of what the steps wrote, or only `step`; with `follow`, until the run has ended."""

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """End a run, whose training saves a checkpoint first; and whether it was still running. Safe to repeat."""

    def list(self) -> list[RunStatus]:
        """The runs that the backend knows, newest first."""

    def resume(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Go on with what `order` started, from its newest checkpoint; what has not ended is left to go on."""
