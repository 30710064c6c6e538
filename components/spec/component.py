"""The shell around every KFP component: it checks the spec, leaves the outcome behind, and ends with the table's code.

A component's body is one call to `run_component`. Whoever runs the DAG on one machine names a folder in
HOLDFAST_OUTCOMES: each step then writes what became of it there, and does not begin once a `stop` file lies in it. A
container on a cluster has no such folder, and its exit code and log say the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from components.spec.environment import store_url
from components.spec.errors import ExitCode, HoldfastError
from components.spec.load import parse_spec
from components.spec.step import configure_logging, exit_code_of
from components.spec.tree import Spec

OUTCOMES = "HOLDFAST_OUTCOMES"
STOP_FILE = "stop"
LOG_FILE = "HOLDFAST_LOG_FILE"  # where the output of the steps goes, for whoever tells a person
RUN_ID = "HOLDFAST_RUN_ID"  # the run that the pipeline makes, where that is known beforehand
KILLED = "the process was killed: out of memory, or somebody ended it"

# The image of every component unless the compiler is told another one.
IMAGE = f"holdfast:{version('holdfast')}"

T = TypeVar("T")


class Artifact(Protocol):
    """The part of a KFP output artifact that a component fills in."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str:
        """Where its file goes."""


class TerminatedError(HoldfastError):
    """The process was asked to leave, and had nothing to save."""

    exit_code = ExitCode.TERMINATED


@dataclass
class Outcome:
    """What became of a step on this machine."""

    step: str
    pid: int
    started: float  # unix seconds
    ended: float | None = None  # unix seconds; None while it runs, or when it was killed
    exit_code: int | None = None
    reason: str = ""  # why it failed

    def write(self, folder: Path) -> None:
        """Write it to `folder` so that a reader sees the whole file or the one before."""
        temporary = folder / f".{self.step}.{self.pid}"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / f"{self.step}.json")


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes in `folder`, in the order in which the steps began."""
    found = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(found, key=lambda outcome: outcome.started)


def outcomes_folder() -> Path | None:
    """The folder that HOLDFAST_OUTCOMES names, if any."""
    value = os.environ.get(OUTCOMES)
    return Path(value) if value else None


def run_component(step: str, spec: str, overrides: Sequence[str], store: str, body: Callable[[Spec, str], T]) -> T:
    """Call `body` with the checked spec and the store's URL (its default resolved) and return what it returns.

    On failure end the process with the table's exit code.
    """

    def begin(outcomes: Path | None) -> T:
        if outcomes and (outcomes / STOP_FILE).exists():
            raise TerminatedError("not begun, because the run was asked to stop")
        checked = parse_spec(spec, overrides)
        return body(checked, store or store_url(checked))

    results, code = _recorded(step, begin)
    if code is not ExitCode.OK:
        raise SystemExit(int(code))
    return results[0]


def run_exit_handler(step: str, body: Callable[[], object]) -> None:
    """Call `body`, after a stop as well. Its failure is logged and recorded; what became of the DAG stands."""
    _recorded(step, lambda _: body())


def _recorded(step: str, begin: Callable[[Path | None], T]) -> tuple[list[T], ExitCode]:
    """What `begin` returned (nothing when it failed) and the exit code, both after leaving the outcome behind."""
    configure_logging()
    _print_lines_at_once()
    signal.signal(signal.SIGTERM, _terminated)
    folder = outcomes_folder()
    outcome = Outcome(step, os.getpid(), time.time())
    if folder:
        outcome.write(folder)  # before looking for the stop file: whoever writes that looks for a process afterwards
    results: list[T] = []

    def guarded() -> None:
        try:
            results.append(begin(folder))
        except BaseException as error:
            known = isinstance(error, HoldfastError) and str(error)
            outcome.reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise

    code = exit_code_of(guarded)
    if folder:
        outcome.exit_code, outcome.ended = int(code), time.time()
        outcome.write(folder)
    return results, code


def point(artifact: Artifact, store: str, key: str, **metadata: object) -> None:
    """Make a KFP artifact a pointer: what it stands for lies in the store under `key`, where Holdfast itself put it."""
    pointer = {"store": store, "key": key, **metadata}
    artifact.metadata.update(pointer)
    Path(artifact.path).write_text(json.dumps(pointer, indent=2) + "\n", encoding="utf-8")


def first_failure() -> Outcome | None:
    """The first step of this run that failed on this machine, with its reason; None if none is known to have."""
    folder = outcomes_folder()
    for outcome in read_outcomes(folder) if folder else []:
        if outcome.ended is None and outcome.pid != os.getpid():
            outcome.exit_code, outcome.reason = int(ExitCode.KILLED), KILLED
        if outcome.exit_code:
            return outcome
    return None


def was_stopped() -> bool:
    """Whether somebody asked the run on this machine to stop."""
    folder = outcomes_folder()
    return folder is not None and (folder / STOP_FILE).exists()


def _print_lines_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    raise TerminatedError("asked to leave (SIGTERM)")
