"""The process that runs the DAG on this machine: `python -m` this module, and a FOLDER.

A process of its own, so that the DAG ends well when the terminal goes away: whoever started it may be killed, and the
steps are still asked to save and leave, and the exit handler runs. When this process is killed, the kernel asks the
step to leave (`local.step`). Its standard output is the log file: a full disk under it costs lines of the log and
nothing else. Leaves the terminal and the summary to `run`, and the order of the steps to `holdfast.pipelines.runner`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from holdfast.launch.parent_death import VARIABLE as PARENT
from holdfast.pipelines.backends.interface import SKIPPED
from holdfast.pipelines.runner import Execution, Handle, Node, Runner, plan
from holdfast.pipelines.step_process import StepProcess
from holdfast.pipelines.trials import Trials, text_of
from holdfast.runtime.logs import configure_logging
from holdfast.runtime.outcomes import OUTCOMES, STOP_FILE, Outcome, read_outcomes
from holdfast.runtime.secrets import StreamRedactor
from holdfast.spec import Spec, parse_spec
from holdfast.spec.json_parsing import parse_json

REQUEST = "request.json"
OUTCOMES_FOLDER = "outcomes"
STEP = "holdfast.pipelines.backends.local.step"
TICK = 0.1  # seconds between two looks at the stop file
_LINE = 0  # a pipe that nobody writes to: it ends when the process that holds the other end, and started this, does


@dataclass(frozen=True)
class Request:
    """What is to be run."""

    spec: str  # its text
    store: str
    salt: str = ""
    replan: bool = False
    trials: Sequence[Sequence[str]] = ()

    def write(self, folder: Path) -> None:
        """Write it where the worker reads it."""
        (folder / REQUEST).write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")


class _Log(io.FileIO):
    """What it cannot take for want of space is lost, and said once there is some. Lines are redacted."""

    lost = 0  # bytes

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._redactor = StreamRedactor()

    def write(self, data: Any) -> int:
        """See RawIOBase."""
        self._write(self._redactor.line(bytes(data).decode("utf-8", "replace")).encode())
        return len(data)

    def _write(self, data: bytes) -> int:
        try:
            if self.lost:
                super().write(f"[{self.lost} bytes are missing here: there was no space left]\n".encode())
                self.lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.lost += len(data)
            return len(data)


def unfailing(descriptor: int) -> TextIO:
    """A stream of lines to `descriptor`, whose disk may be full."""
    raw = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)


def request_stop(folder: Path) -> None:
    """Have the worker ask the running step to save and leave, and start no other one but the exit handler."""
    (folder / OUTCOMES_FOLDER / STOP_FILE).touch()


class LocalSteps:
    """Steps as processes of this machine, one at a time: each takes all of it. See StepBackend."""

    width = 1

    def __init__(self, folder: Path, request: Request, holders: Sequence[int] = ()) -> None:
        """`holders`: descriptors that keep the folder while a step lives that has lost its worker."""
        self._folder, self._request, self._holders = folder / OUTCOMES_FOLDER, request, holders
        self.on_stop: Callable[[], None] = lambda: None  # called while the stop file is there

    def start(self, execution: Execution) -> Handle:
        """See StepBackend."""
        words = [f"--store={self._request.store}", *execution.arguments]
        return StepProcess(execution.step, execution.name, self._request.spec, words, self._popen)

    def wait(self, handles: Sequence[Handle]) -> None:
        """See StepBackend."""
        for handle in handles:
            assert isinstance(handle, StepProcess)
            handle.wait(TICK)
        if (self._folder / STOP_FILE).exists() or not self._folder.is_dir():  # who took it away has asked, and has gone
            self.on_stop()

    def retries(self, _step: str) -> int:
        """None: a person sees the failure, and the same command is the retry."""
        return 0

    def record(self, outcome: Outcome) -> None:
        """See StepBackend. What is skipped shows in the verdict."""
        if not outcome.result.startswith(SKIPPED):
            outcome.write(self._folder)

    def outcomes(self) -> list[Outcome]:
        """See StepBackend."""
        return read_outcomes(self._folder)

    def _popen(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", STEP, *words],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, PARENT: str(os.getpid())}, pass_fds=self._holders,
        )  # fmt: skip


def local_plan(spec: Spec, trials: Trials = ()) -> tuple[Node, ...]:
    """The nodes of the DAG on one machine, which shares nothing out: its cores are `data.workers`."""
    return plan(spec.model_copy(update={"data": spec.data.model_copy(update={"fan_out": 1})}), trials)


def run_dag(folder: Path, holders: Sequence[int] = ()) -> int:
    """Run what is asked for in `folder`; the exit code of the first step that failed."""
    request = parse_json((folder / REQUEST).read_bytes(), Request, REQUEST)
    spec, trials = parse_spec(request.spec), tuple(map(tuple, request.trials))
    given = {"salt": request.salt, "replan": str(request.replan).lower()} | (
        {"trials": text_of(trials)} if trials else {}
    )
    steps = LocalSteps(folder, request, holders)
    runner = Runner(local_plan(spec, trials), steps, given)
    steps.on_stop = runner.request_stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: request_stop(folder))
    threading.Thread(target=_stop_when_left_alone, args=[folder], daemon=True).start()
    return runner.run()


def _stop_when_left_alone(folder: Path) -> None:
    # Not sys.stdin, whose lock a thread that waits for it would keep until after the interpreter has gone.
    os.read(_LINE, 1)
    with suppress(FileNotFoundError):
        request_stop(folder)


def main(argv: Sequence[str]) -> int:
    """Run what is asked for in the folder that the command line names; descriptors that hold it come after it."""
    folder = Path(argv[0])
    os.environ[OUTCOMES] = str(folder / OUTCOMES_FOLDER)
    sys.stdout = sys.stderr = unfailing(1)
    configure_logging()
    return run_dag(folder, [int(descriptor) for descriptor in argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
