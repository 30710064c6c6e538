"""Follow the process that runs the DAG: show its steps on the terminal, and forward signals to it.

No step keeps running unattended. If the process that runs the DAG dies, the kernel sends the running step SIGTERM
(`local.step`), even if this process is dead too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from holdfast.pipelines.backends.local import worker
from holdfast.pipelines.view.terminal import Board
from holdfast.runtime.environment import OUTCOMES
from holdfast.runtime.temporary import holders_of
from holdfast.spec import ExitCode
from holdfast.steps import STEPS
from holdfast.steps.outcomes import LOG_FILE, RUN_ID, Outcome, read_outcomes
from holdfast.telemetry.channel import PIPE
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import Progress

TICK = 0.1  # seconds between polls of the steps
ORPHAN_SECONDS = 4000.0  # for a step whose pipeline was killed: up to an hour of grace, then MLflow


def follow(folder: Path, log: Path, run: str, board: Board, signals: Signals) -> bool:
    """Start the worker and follow it to its end: show the steps and forward signals. Returns whether it was killed."""
    events = PipeEvents(folder / "events")
    environment = {
        **os.environ,
        PIPE: os.pathsep.join(filter(None, (os.environ.get(PIPE), str(folder / "events")))),
        OUTCOMES: str(folder / worker.OUTCOMES_FOLDER),
        LOG_FILE: str(log),
        RUN_ID: run,
        "PYTHONSAFEPATH": "1",  # a folder called `components` in the working directory must not be imported
        "PYTHONUNBUFFERED": "1",
    }
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(folder), *map(str, holders_of(folder))],
            stdin=subprocess.PIPE,  # never written to: its end makes the worker stop the steps when this process dies
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once to the step
            pass_fds=holders_of(folder),  # the worker outlives this process and needs the folder
        ) as process,
    ):
        view = View(board, folder / worker.OUTCOMES_FOLDER, events)
        forwarded_count = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TICK)
            view.look()
            if len(signals.received) > forwarded_count:
                forwarded_count = len(signals.received)
                if forwarded_count == 1:
                    board.say(f"  stopping: {view.stop_effect()} (once more ends it immediately)")
                    worker.request_stop(folder)
                else:
                    _kill(process.pid)
            if process.returncode is not None:
                break
        if process.returncode < 0:  # killed: its step is an orphan, which the kernel asks to save and exit
            worker.request_stop(folder)
            _wait_for_orphans(folder / worker.OUTCOMES_FOLDER, view, signals)
        view.look()
        return process.returncode < 0


class View:
    """Shows outcomes and events on the board."""

    def __init__(self, board: Board, folder: Path, events: PipeEvents) -> None:
        self.board = board
        self.folder = folder
        self.events = events
        self._begun: set[tuple[str, float]] = set()  # a step of a sweep occurs once for each trial
        self._ended: set[tuple[str, float]] = set()
        self._progress = ""
        self._trained = ""  # progress of the training

    def look(self) -> None:
        """Show new outcomes and events."""
        progress, notices = "", []
        for event in self.events.new():
            if isinstance(event, Progress):
                self._trained = event.text
            if not event.notable and not event.silent:
                progress = event.text
            elif event.is_news:
                notices.append(event.text)
        for outcome in read_outcomes(self.folder):
            if outcome.step == "notify":
                continue
            key = (outcome.name, outcome.started)
            if key not in self._begun:
                self._begun.add(key)
                self._progress = ""
                self.board.begin(outcome.name, outcome.started)
            if progress and key not in self._ended:
                self._progress = progress
                self.board.progress(progress)
            if outcome.ended is not None and key not in self._ended:
                self._ended.add(key)
                code = ExitCode.UNEXPECTED if outcome.exit_code is None else outcome.exit_code
                self.board.end(outcome.name, outcome.ended - outcome.started, code, self._ending_of(outcome))
        for notice in notices:
            self.board.say(f"  {notice}")
        self.board.tick()

    def stop_effect(self) -> str:
        """What the running steps do when they are stopped. Only a training saves."""
        steps = [outcome for outcome in read_outcomes(self.folder) if outcome.step != "notify"]
        running = [outcome.step for outcome in steps if outcome.ended is None]
        if "train" in running:
            return "the training saves and exits"
        if not running:
            return "the run ends before its next step"
        return f"the step {running[-1]} ends, and the same command starts it again"

    def _ending_of(self, outcome: Outcome) -> str:
        """The text of the line of an ended step."""
        if outcome.step == "train":
            return self._trained
        if outcome.exit_code != 0:
            return self._progress
        return STEPS[outcome.step].message.format(outcome.result.replace("_", " "))


class Signals:
    """Collects SIGINT and SIGTERM while the pipeline runs."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        self.received.append(signum)


def _wait_for_orphans(outcomes: Path, view: View, signals: Signals) -> None:
    """Wait until the stopped steps have exited. Kill those that exceed the limit; a second signal kills them
    immediately.
    """
    import psutil

    deadline = time.monotonic() + ORPHAN_SECONDS
    for outcome in read_outcomes(outcomes):
        with contextlib.suppress(psutil.NoSuchProcess):
            while outcome.ended is None:
                try:
                    psutil.Process(outcome.pid).wait(TICK)
                    break
                except psutil.TimeoutExpired:
                    view.look()
                    if len(signals.received) > 1 or time.monotonic() > deadline:
                        _kill(outcome.pid)
                        break


def _kill(pid: int) -> None:
    """Kill a process and all its descendants immediately."""
    import psutil

    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
