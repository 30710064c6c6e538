"""The shell around every step: it checks the spec, leaves the outcome behind, and ends with the table's code.

The body of a KFP component is one call to `run_component`, that of a `__main__.py` one to `run_main`. Secrets that are
mounted under SECRETS become environment variables first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from holdfast.components.runtime.argv import publish, spec_and_store
from holdfast.components.runtime.environment import store_url
from holdfast.components.runtime.exits import exit_code_of
from holdfast.components.runtime.logs import configure_logging
from holdfast.components.runtime.outcomes import POD, STOP_FILE, Outcome, Recorder, outcomes_folder
from holdfast.components.spec.errors import ExitCode, HoldfastError, TerminatedError
from holdfast.components.spec.load import parse_spec
from holdfast.components.spec.tree import Spec

SECRETS = Path("/etc/holdfast/secrets")  # <Secret>/<key>: KFP mounts whole Secrets, but has no envFrom

# The image of every component unless the compiler is told another one.
IMAGE = f"holdfast:{version('holdfast')}"

T = TypeVar("T")


class Artifact(Protocol):
    """The part of a KFP output artifact that a component fills in."""

    metadata: dict[str, Any]

    @property
    def path(self) -> str:
        """Where its file goes."""


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


def _print_lines_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    raise TerminatedError("asked to leave (SIGTERM)")
