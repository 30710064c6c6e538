"""The process that runs the DAG on this machine: `python -m` this module, and a FOLDER.

It is a separate process, so that the DAG ends correctly without its terminal. If its parent is killed, the steps still
save and exit, and the exit handler runs. If this process is killed, the kernel sends SIGTERM to the step
(`local.step`). Its standard output is the log file: a full disk costs lines of the log and nothing else. `run` has the
terminal and the summary, and `holdfast.pipelines.runner` the order of the steps.
"""

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

from holdfast.launch.choose import VARIABLE as LAUNCHER
from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.launch.ssh.hosts import VARIABLE as HOSTS
from holdfast.pipelines.backends.interface import SKIPPED
from holdfast.pipelines.runner import Execution, Handle, Node, Runner, plan
from holdfast.pipelines.step_process import StepProcess
from holdfast.pipelines.submitted_search import SearchRunner
from holdfast.pipelines.trials import Trials, text_of
from holdfast.runtime.environment import OUTCOMES
from holdfast.runtime.logs import configure_logging
from holdfast.runtime.secrets import StreamRedactor
from holdfast.search.method import Search
from holdfast.spec import Spec, parse_spec
from holdfast.spec.json_parsing import parse_json
from holdfast.steps.outcomes import STOP_FILE, Outcome, read_outcomes
from holdfast.store import open_store

REQUEST = "request.json"
OUTCOMES_FOLDER = "outcomes"
STEP = "holdfast.pipelines.backends.local.step"
TICK = 0.1  # seconds between checks of the stop file
_LINE = 0  # a pipe without data: it closes when the parent, which holds the other end, exits


@dataclass(frozen=True)
class Request:
    """The request to the worker."""

    spec: str  # text of the spec
    store: str
    salt: str = ""
    replan: bool = False
    trials: Sequence[Sequence[str]] = ()
    hosts: str = ""  # file of the machines that train; empty: this machine
    search: Search | None = None
    search_id: str = ""

    def write(self, folder: Path) -> None:
        """Write the request to the folder from which the worker reads it."""
        (folder / REQUEST).write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")


class _Log(io.FileIO):
    """A log file that survives a full disk. Lost bytes are counted and reported once there is space. Lines are
    redacted.
    """

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
    """A line-buffered text stream to `descriptor` that survives a full disk."""
    raw = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)


def request_stop(folder: Path) -> None:
    """Make the worker stop the running step, which saves, and start no further step except the exit handler."""
    (folder / OUTCOMES_FOLDER / STOP_FILE).touch()


class LocalSteps:
    """Steps as processes of this machine, one at a time, because each uses the whole machine. See StepBackend."""

    width = 1

    def __init__(self, folder: Path, request: Request, holders: Sequence[int] = ()) -> None:
        """`holders`: descriptors that keep the folder while a step without its worker lives."""
        self._folder, self._request, self._holders = folder / OUTCOMES_FOLDER, request, holders
        self._launcher = {LAUNCHER: "ssh", HOSTS: request.hosts} if request.hosts else {}
        self.on_stop: Callable[[], None] = lambda: None  # called while the stop file exists

    def start(self, execution: Execution) -> Handle:
        """See StepBackend."""
        arguments = [f"--store={self._request.store}", *execution.arguments]
        return StepProcess(execution.step, execution.name, self._request.spec, arguments, self._popen)

    def wait(self, handles: Sequence[Handle]) -> None:
        """See StepBackend."""
        for handle in handles:
            assert isinstance(handle, StepProcess)
            handle.wait(TICK)
        if (self._folder / STOP_FILE).exists() or not self._folder.is_dir():  # a missing folder also means stop
            self.on_stop()

    def retries(self, _step: str) -> int:
        """Always 0: a person sees the failure, and repeating the command is the retry."""
        return 0

    def record(self, outcome: Outcome) -> None:
        """See StepBackend. Skipped steps are not written; the verdict shows them."""
        if not outcome.result.startswith(SKIPPED):
            outcome.write(self._folder)

    def outcomes(self) -> list[Outcome]:
        """See StepBackend."""
        return read_outcomes(self._folder)

    def _popen(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", STEP, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._launcher, PARENT: str(os.getpid())},
            pass_fds=self._holders,
        )


def local_plan(spec: Spec, trials: Trials = ()) -> tuple[Node, ...]:
    """The nodes of the DAG on one machine, without fan-out: `data.workers` uses its cores."""
    return plan(spec.with_overrides({"data.fan_out": 1}), trials)


def run_dag(folder: Path, holders: Sequence[int] = ()) -> int:
    """Run the request in `folder`. Returns the exit code of the first step that failed."""
    request = parse_json((folder / REQUEST).read_bytes(), Request, REQUEST)
    spec, trials = parse_spec(request.spec), tuple(map(tuple, request.trials))
    parameters = {"salt": request.salt, "replan": str(request.replan).lower()}
    steps = LocalSteps(folder, request, holders)
    if request.search is not None:
        search, store = request.search, open_store(request.store)
        runner: Runner = SearchRunner(search, request.search_id, spec, store, steps, parameters)
    else:
        given = {"trials": text_of(trials)} if trials else {}
        runner = Runner(local_plan(spec, trials), steps, parameters | given)
    steps.on_stop = runner.request_stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: request_stop(folder))
    threading.Thread(target=_stop_when_left_alone, args=[folder], daemon=True).start()
    return runner.run()


def _stop_when_left_alone(folder: Path) -> None:
    # Not sys.stdin: a thread that waits on it would hold its lock until after the interpreter exits.
    os.read(_LINE, 1)
    with suppress(FileNotFoundError):
        request_stop(folder)


def main(argv: Sequence[str]) -> int:
    """Run the request in the folder that the command line names; further arguments are descriptors that hold the
    folder.
    """
    folder = Path(argv[0])
    os.environ[OUTCOMES] = str(folder / OUTCOMES_FOLDER)
    sys.stdout = sys.stderr = unfailing(1)
    configure_logging()
    return run_dag(folder, [int(descriptor) for descriptor in argv[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
