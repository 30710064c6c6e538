"""Local launcher: torchrun on this machine."""

import errno
import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.exits import FILE_VARIABLE, as_exit_code, parse_exit_report
from holdfast.launch.interface import LEAVE_MARGIN, GangExit, Job
from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.launch.processes import PRELOAD_VARIABLE, WarmProcess, WarmServer
from holdfast.launch.reporting import LaunchLog
from holdfast.runtime.environment import home, make_folder
from holdfast.runtime.locks import NO_LOCKS, no_locks
from holdfast.runtime.output import redacted_pieces
from holdfast.runtime.secrets import for_ranks
from holdfast.telemetry import emit
from holdfast.telemetry.events import WarningIssued

log = logging.getLogger("holdfast.launch")

TAIL_LINES = 40
END_SECONDS = 10.0  # from the death of torchrun to that of all its ranks; then the next launch starts anyway
WRAPPER = "holdfast.launch.torchrun"
MODULES = (  # of the wrapper, imported once for all launches; its agent imports torch's agent
    WRAPPER,
    "torch.distributed.run",
    "holdfast.launch.node.fast_exit_agent",
)


@dataclass(eq=False)
class LocalGang:
    """The processes of a launch on this machine, led by the wrapper around torchrun."""

    job: Job
    process: subprocess.Popen[bytes] | WarmProcess
    output: TextIO  # what the processes print
    presence: socket.socket  # the other end is stdin of all processes; it reaches EOF when all have ended

    def kill(self) -> None:
        """Send SIGKILL to all processes of the gang."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def wait_for_ranks(self, seconds: float = END_SECONDS) -> None:
        """Wait at most `seconds` for the ranks to end after the process that leads them was killed."""
        if not select.select([self.presence], [], [], seconds)[0]:
            log.warning("launch %d: processes are left %g s after torchrun was killed", self.job.launch, seconds)


class LocalLauncher:
    """Launcher that runs torchrun on this machine. The gang has its own session, so Ctrl-C reaches it only through
    `stop`. It dies with this process, so no orphan continues to train."""

    def __init__(self, logs: Path) -> None:
        """`logs` is the folder for the ranks' output, with one file for each launch."""
        self._logs = logs
        self._gang: LocalGang | None = None
        self._server: WarmServer | None = None
        self._preloads = True  # whether the modules of `train.preload` can be imported before a fork
        self._stopping = False
        self._grace = 0.0

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:
        """See Launcher. Holds this machine's lock of the run. Raises OSError where the file system has no locks."""
        with only_one_here(run_id):
            try:
                yield
            finally:
                self.close()

    def adopt(self, run_id: str, launch: int) -> bool:  # noqa: ARG002
        """See Launcher. Always False: no gang outlives the launcher that started it."""
        return False

    def run(self, job: Job) -> GangExit:
        """See Launcher. Call it from the main thread: the gang dies with the thread that started it."""
        self._grace = job.grace_seconds
        make_folder(self._logs)
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        path, report_file = self._log_of(job), self._exit_report_of(job)
        report_file.write_text("")
        gang = self._gang = self._start(job)
        with _killed_with_us(gang):
            if self._stopping:  # stopped between two launches
                self.stop()
            with gang.output:
                _keep(gang.output, path, tail)
            status = gang.process.wait()
            if status < 0:  # the ranks die with it a moment later; the next launch may need their resources
                gang.wait_for_ranks()
        ending = parse_exit_report(report_file.read_text())  # None when torchrun itself was killed
        code = ending.code if ending else as_exit_code(status)
        blamed = frozenset({ending.node}) if ending is not None and ending.blames_node else frozenset[str]()
        detail = f"{ending.detail}. The log is {path}" if ending is not None and ending.detail else f"The log is {path}"
        cause = ending.cause if ending else None
        rank, attempt = (cause.rank, cause.attempt) if cause else (None, None)
        return GangExit(code, tuple(tail), detail, blamed, rank, attempt=attempt, elsewhere=False)

    def _log_of(self, job: Job) -> Path:
        return self._logs / f"launch-{job.launch:06d}.log"

    def _exit_report_of(self, job: Job) -> Path:
        return self._log_of(job).with_suffix(".ending.json")

    def _arguments(self, job: Job) -> list[str]:
        return [
            "--nnodes=1",
            f"--nproc-per-node={job.processes}",
            "--max-restarts=0",
            "--monitor-interval=0.05",
            f"--shutdown-timeout={max(1, int(job.grace_seconds))}",
            *job.command,
        ]

    def _environment(self, job: Job) -> dict[str, str]:
        return {
            **for_ranks(os.environ),
            **ACCELERATORS[job.cluster.accelerator].environment,
            **job.cluster.environment,
            **job.environment,
            "OMP_NUM_THREADS": str(job.threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            FILE_VARIABLE: str(self._exit_report_of(job)),
            PARENT: str(os.getpid()),
        }

    def _start(self, job: Job) -> LocalGang:
        """Start the wrapper, and capture what it and its ranks print. It is forked from a process that has imported
        their modules, so a launch after a failure costs no import."""
        output, printed = os.pipe()
        presence, stdin = socket.socketpair()
        presence.shutdown(socket.SHUT_WR)  # reading `presence` yields only EOF
        try:
            process = self._start_warm(job, stdin.fileno(), printed) or subprocess.Popen(
                [sys.executable, "-m", WRAPPER, *self._arguments(job)],
                env=self._environment(job),
                stdin=stdin.fileno(),
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
        except BaseException:
            os.close(output)
            presence.close()
            raise
        finally:
            os.close(printed)
            stdin.close()
        return LocalGang(job, process, os.fdopen(output, encoding="utf-8", errors="replace"), presence)

    def _start_warm(self, job: Job, stdin: int, printed: int) -> WarmProcess | None:
        """The process, or None where no warm server can start it."""
        modules = [*MODULES, *(job.command[1:2] if job.command[0] == "-m" else ())]
        environment, fresh = self._environment(job), False
        if not self._preloads:
            environment.pop(PRELOAD_VARIABLE, None)
        while not fresh:  # a server may have been killed since the last launch
            try:
                if fresh := self._server is None:
                    self._server = WarmServer.spawn(modules, environment)
                assert self._server is not None
                return self._server.start(WRAPPER, self._arguments(job), environment, printed, printed, stdin=stdin)
            except OSError as error:
                log.debug("nothing starts warm: %s", error)
                self._close_server()
                if fresh and PRELOAD_VARIABLE in environment:
                    del environment[PRELOAD_VARIABLE]
                    log.warning("train.preload: nothing is preloaded, because a module starts threads or ends Python")
                    self._preloads = fresh = False
        return None

    def close(self) -> None:
        """Close the server that launches are forked from."""
        self._close_server()

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def stop(self) -> None:
        """See Launcher."""
        self._stopping = True
        gang = self._gang
        if gang is not None and gang.process.poll() is None:
            gang.process.send_signal(signal.SIGTERM)
            timer = threading.Timer(self._grace + LEAVE_MARGIN, gang.kill)
            timer.daemon = True
            timer.start()


@contextmanager
def only_one_here(run_id: str) -> Iterator[None]:
    """Hold this machine's lock of the run; waits for it. Raises OSError where the file system has no locks."""
    path = home() / "locks" / f"{run_id}.lock"
    make_folder(path.parent)
    with path.open("a+") as lock:
        try:
            _lock(lock, run_id)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            remedy = "set HOLDFAST_HOME to a folder on a disk of this machine"
            raise no_locks(path, error, remedy) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _lock(lock: TextIO, run_id: str) -> None:
    """Take the lock. Waits while another process trains the run."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        number = lock.read().strip()  # which is written after the lock is taken
        holder = f"process {number}" if number else "another process"
        message = f"run {run_id} is being trained by {holder} on this machine; waiting until it ends"
        log.warning(message)
        emit(WarningIssued(message=message))
        fcntl.flock(lock, fcntl.LOCK_EX)


def _keep(output: TextIO, path: Path, tail: deque[str]) -> None:
    """Write what a launch prints to the file `path`, until it has ended."""
    with _naming(path), LaunchLog(path) as printed:
        for text in redacted_pieces(output):
            printed.write(text)
            tail.append(text.rstrip("\n"))


@contextmanager
def _killed_with_us(gang: LocalGang) -> Iterator[None]:
    """Kill the gang after an error in this process, such as a full disk under the log: no process follows it now."""
    try:
        yield
    except BaseException:
        gang.kill()
        gang.process.wait()
        with suppress(OSError):
            gang.output.close()
        raise
    finally:
        gang.presence.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to an error of a full disk: an error of a write or a close does not have it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)
        raise
