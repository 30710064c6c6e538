"""Runner of a step: always records its outcome, and exits with its exit code.

First, mounted settings and secrets become environment variables. `holdfast.steps.adapters` handles arguments and
results.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

from holdfast.runtime.environment import give_home, outcomes_folder
from holdfast.runtime.exits import exit_code_of, explained, on_shutdown_request, request_shutdown
from holdfast.runtime.logs import configure_logging, copied_records
from holdfast.runtime.output import copied_output, prepare_streams, redacted_output
from holdfast.runtime.signals import prompt_signals
from holdfast.spec.engine_text import restore_environment
from holdfast.spec.errors import ExitCode, HoldfastError, TerminatedError
from holdfast.steps.outcomes import EXIT_HANDLER, POD, Outcome, Recorder, was_stopped

# <ConfigMap or Secret>/<key>: KFP mounts them whole, but has no envFrom.
MOUNTED_SETTINGS, MOUNTED_SECRETS = Path("/etc/holdfast/settings"), Path("/etc/holdfast/secrets")

# The default image of every component.
IMAGE = f"holdfast:{version('holdfast')}"


class StepLog(Protocol):
    """Log of a step, in addition to its standard streams."""

    def write(self, text: str) -> None:
        """Add whole lines. Never waits."""

    def open(self, url: str) -> None:
        """Set the store at `url` as the destination of earlier and later lines."""

    def hurry(self) -> None:
        """Store what was written immediately: the process may end soon."""

    def close(self, code: int) -> None:
        """Store the rest, within a deadline. `code` is the exit code of the step."""


class HasSummary(Protocol):
    """Result of a step."""

    @property
    def summary(self) -> str:
        """The text for the exit handler."""


T = TypeVar("T", bound=HasSummary)


def run_step(
    step: str,
    body: Callable[[Callable[[str], None]], T],
    record: Recorder | None = None,
    part: str = "",
    step_log: StepLog | None = None,
) -> tuple[T | None, ExitCode]:
    """Call `body` and record the outcome. Returns its result (None if it failed) and the exit code.

    `body` gets a function to call with the store's URL before the work begins. `record` stores the outcome if
    HOLDFAST_OUTCOMES names no folder. `part` distinguishes concurrent parts of the same step. `step_log` gets the
    step's log records and output.
    """
    restore_environment()
    files_to_environment(MOUNTED_SETTINGS, MOUNTED_SECRETS)
    give_home()
    prepare_streams()
    _print_lines_immediately()
    with redacted_output(), prompt_signals():
        configure_logging()  # before the streams are copied: records go to the log separately
        if step_log is None:
            return _run(step, body, record, part, None)
        code = ExitCode.UNEXPECTED
        try:
            with copied_records(step_log.write), copied_output(step_log.write):
                results, code = _run(step, body, record, part, step_log)
                return results, code
        finally:
            _close(step_log, code)


def _close(step_log: StepLog, code: ExitCode) -> None:
    """Store the end of the log. The outcome is already recorded: a signal must not change it."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        step_log.close(int(code))
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def _run(
    step: str,
    body: Callable[[Callable[[str], None]], T],
    record: Recorder | None,
    part: str,
    step_log: StepLog | None,
) -> tuple[T | None, ExitCode]:
    handler = signal.signal(signal.SIGTERM, _terminated)
    keeper = _Kept(outcomes_folder(), record)
    outcome = Outcome(step, os.getpid(), time.time(), pod=os.environ.get(POD, ""), part=part)
    keeper.save(outcome)  # before the test for the stop file: its writer looks for a process afterwards
    results: list[T] = []

    def require_wanted() -> None:
        if step != EXIT_HANDLER and was_stopped():
            raise TerminatedError("not begun, because the run was stopped")

    def begun(url: str) -> None:
        keeper.url = url
        if step_log is not None:
            step_log.open(url)
        keeper.save(outcome)  # so that a step that is killed later has a record of its start
        require_wanted()  # again: while a folder is being removed, the stop file may go first

    def guarded() -> None:
        try:
            require_wanted()
            results.append(body(begun))
            outcome.result = results[0].summary
        except BaseException as error:
            meant = explained(error)
            is_known = isinstance(meant, HoldfastError) and str(meant)
            outcome.reason = str(meant) if is_known else f"{type(error).__name__}: {error}"
            raise
        finally:  # the rest records how it ended: a signal must not replace it
            signal.signal(signal.SIGTERM, lambda *_: None)

    def leaving() -> None:
        if step_log is not None:
            step_log.hurry()
        keeper.leaving(outcome)

    with on_shutdown_request(leaving):
        code = exit_code_of(guarded)
    outcome.exit_code, outcome.ended = int(code), time.time()
    keeper.save(outcome, last=True)
    signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    return (results[0] if results else None), code


@dataclass
class _Kept:
    """Destination of outcomes: the folder on one machine, else the recorder once the store is known."""

    folder: Path | None
    record: Recorder | None
    url: str = ""
    final: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def save(self, outcome: Outcome, last: bool = False) -> None:
        with self.lock:
            if self.final:
                return
            self.final = last
            if self.folder:
                with suppress(FileNotFoundError):  # the reader is gone: `was_stopped`
                    outcome.write(self.folder)
            elif self.record and self.url:
                self.record(self.url, outcome)

    def leaving(self, outcome: Outcome) -> None:
        """Record the likely ending now, because the process may end before it has another one. On one machine it does
        not: there only the process itself ends, and others wait for that."""
        if not self.folder:
            code, reason = int(ExitCode.TERMINATED), str(_leave())
            self.save(replace(outcome, ended=time.time(), exit_code=code, reason=reason))


def files_to_environment(*roots: Path) -> None:
    """Set a variable for every key mounted under `roots` that is a valid variable name. As with `envFrom`, existing
    variables stay, and of two objects with one key the last one counts."""
    used = set(os.environ)
    for file in (file for root in roots for file in sorted(root.glob("[!.]*/[!.]*"))):
        if file.name.isidentifier() and file.name.isascii() and file.name not in used and file.is_file():
            os.environ[file.name] = file.read_text(encoding="utf-8")


def _print_lines_immediately() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def _terminated(_signum: int, _frame: FrameType | None) -> None:
    request_shutdown()
    raise _leave()


def _leave() -> TerminatedError:
    return TerminatedError("stop requested (SIGTERM)")
