"""The shell around every KFP component: it checks the spec, leaves the outcome behind, and ends with the table's code.

A component's body is one call to `run_component`. Whoever runs the DAG on one machine names a folder in
HOLDFAST_OUTCOMES: each step then writes what became of it there, and does not begin once a `stop` file lies in it. A
container on a cluster has no such folder: it hands its outcome to the recorder it was given, which knows the store.
Secrets that are mounted under SECRETS become environment variables first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from holdfast.components.spec.environment import store_url
from holdfast.components.spec.errors import ExitCode, HoldfastError, TerminatedError
from holdfast.components.spec.identity import run_id
from holdfast.components.spec.load import parse_spec
from holdfast.components.spec.step import configure_logging, exit_code_of, publish, spec_and_store
from holdfast.components.spec.tree import Spec

OUTCOMES = "HOLDFAST_OUTCOMES"
STOP_FILE = "stop"
LOG_FILE = "HOLDFAST_LOG_FILE"  # where the output of the steps goes, for whoever tells a person
RUN_ID = "HOLDFAST_RUN_ID"  # the run that the pipeline makes, where that is known beforehand
POD = "HOLDFAST_POD_NAME"
EXIT_HANDLER = "notify"
SECRETS = Path("/etc/holdfast/secrets")  # <Secret>/<key>: KFP mounts whole Secrets, but has no envFrom
KILLED = "the process was killed: out of memory, or somebody ended it"

# The image of every component unless the compiler is told another one.
IMAGE = f"holdfast:{version('holdfast')}"

T = TypeVar("T")
Recorder = Callable[[str, "Outcome"], None]  # called with the store's URL


class Artifact(Protocol):
    """The part of a KFP output artifact that a component fills in."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str:
        """Where its file goes."""


@dataclass
class Outcome:
    """What became of a step."""

    step: str
    pid: int
    started: float  # unix seconds
    ended: float | None = None  # unix seconds; None while it runs, or when it was killed
    exit_code: int | None = None
    reason: str = ""  # why it failed
    result: str = ""  # what it returned: the dataset id, the run id, the verdict's word, the version
    pod: str = ""  # where it ran on a cluster

    def as_json(self) -> bytes:
        """The outcome as a JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False).encode()

    def write(self, folder: Path) -> None:
        """Write it to `folder` so that a reader sees the whole file or the one before."""
        temporary = folder / f".{self.step}.{self.pid}"
        temporary.write_bytes(self.as_json())
        temporary.replace(folder / f"{self.step}.json")


def read_outcomes(folder: Path) -> list[Outcome]:
    """The outcomes in `folder`, in the order in which the steps began."""
    found = [Outcome(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.json")]
    return sorted(found, key=lambda outcome: outcome.started)


def outcomes_folder() -> Path | None:
    """The folder that HOLDFAST_OUTCOMES names, if any."""
    value = os.environ.get(OUTCOMES)
    return Path(value) if value else None


def run_component(
    step: str,
    spec: str,
    overrides: Sequence[str],
    store: str,
    body: Callable[[Spec, str], T],
    record: Recorder | None = None,
) -> T:
    """Call `body` with the checked spec and the store's URL (its default resolved) and return what it returns.

    `record` keeps the outcome where HOLDFAST_OUTCOMES names no folder. On failure end the process with its code.
    """

    def begin(outcome: Outcome, kept: _Kept) -> T:
        if kept.folder and (kept.folder / STOP_FILE).exists():
            raise TerminatedError("not begun, because the run was asked to stop")
        checked = parse_spec(spec, overrides)
        kept.url = store or store_url(checked)
        if not kept.folder:
            kept.save(outcome)  # a step that is killed later leaves its beginning
        return body(checked, kept.url)

    results, code = _recorded(step, begin, record)
    if code is not ExitCode.OK:
        raise SystemExit(int(code))
    return results[0]


def run_main(
    step: str,
    arguments: argparse.Namespace,
    body: Callable[[Spec, str], tuple[dict[str, Any], str]],
    record: Recorder | None = None,
) -> ExitCode:
    """Call `body` with the spec and the store's URL that the arguments of `step_parser` name, and publish what it
    returns: its result, and the one word of it that the exit handler wants to know. Returns the table's code."""

    def begin(outcome: Outcome, kept: _Kept) -> str:
        spec, kept.url = spec_and_store(arguments)
        kept.save(outcome)  # a step that is killed later leaves its beginning
        result, word = body(spec, kept.url)
        publish(result, arguments.output, arguments.outputs)
        return word

    return _recorded(step, begin, record)[1]


def run_exit_handler(step: str, body: Callable[[], object]) -> None:
    """Call `body`, after a stop as well. Its failure is logged and recorded; what became of the DAG stands."""
    _recorded(step, lambda *_: body(), None)


@dataclass
class _Kept:
    """Where outcomes go: the folder on one machine, else the recorder once the store is known."""

    folder: Path | None
    record: Recorder | None
    url: str = ""

    def save(self, outcome: Outcome) -> None:
        if self.folder:
            outcome.write(self.folder)
        elif self.record and self.url:
            self.record(self.url, outcome)


def _recorded(step: str, begin: Callable[[Outcome, _Kept], T], record: Recorder | None) -> tuple[list[T], ExitCode]:
    """What `begin` returned (nothing when it failed) and the exit code, both after leaving the outcome behind."""
    secrets_to_environment(SECRETS)
    configure_logging()
    _print_lines_at_once()
    signal.signal(signal.SIGTERM, _terminated)
    kept = _Kept(outcomes_folder(), record)
    outcome = Outcome(step, os.getpid(), time.time(), pod=os.environ.get(POD, ""))
    kept.save(outcome)  # before looking for the stop file: whoever writes that looks for a process afterwards
    results: list[T] = []

    def guarded() -> None:
        try:
            results.append(begin(outcome, kept))
            outcome.result = str(results[0] or "")
        except BaseException as error:
            known = isinstance(error, HoldfastError) and str(error)
            outcome.reason = str(error) if known else f"{type(error).__name__}: {error}"
            raise

    code = exit_code_of(guarded)
    outcome.exit_code, outcome.ended = int(code), time.time()
    kept.save(outcome)
    return results, code


def secrets_to_environment(root: Path) -> None:
    """Set a variable for every key of the Secrets mounted under `root` that is a variable's name. As with `envFrom`, a
    variable that is set already stays, and of two Secrets with one key the last one counts."""
    taken = set(os.environ)
    for file in sorted(root.glob("[!.]*/[!.]*")):
        if file.name.isidentifier() and file.name.isascii() and file.name not in taken and file.is_file():
            os.environ[file.name] = file.read_text(encoding="utf-8")


def point(artifact: Artifact, store: str, key: str, **metadata: object) -> None:
    """Make a KFP artifact a pointer: what it stands for lies in the store under `key`, where Holdfast itself put it."""
    pointer = {"store": store, "key": key, **metadata}
    artifact.metadata.update(pointer)
    Path(artifact.path).write_text(json.dumps(pointer, indent=2) + "\n", encoding="utf-8")


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The first step that failed before the exit handler, with its reason; None if none is known to have."""
    for outcome in outcomes:
        if outcome.ended is None and outcome.step != EXIT_HANDLER:
            outcome.exit_code, outcome.reason = int(ExitCode.KILLED), KILLED
        if outcome.exit_code:
            return outcome
    return None


def run_of(outcomes: Iterable[Outcome], spec: str, overrides: Sequence[str], salt: str) -> str:
    """The run id of the DAG: what train returned, else from what preprocess returned; empty if that did not end or the
    spec is refused."""
    outcomes = list(outcomes)
    if trained := next((outcome.result for outcome in outcomes if outcome.step == "train"), ""):
        return trained
    dataset_id = next((outcome.result for outcome in outcomes if outcome.step == "preprocess"), "")
    try:
        return run_id(parse_spec(spec, overrides), dataset_id, salt) if dataset_id else ""
    except HoldfastError:
        return ""


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
