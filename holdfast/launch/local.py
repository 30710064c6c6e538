"""The local launcher: torchrun on this machine."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from holdfast.launch import turn
from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.ending import FILE_VARIABLE, as_exit_code, parse_ending
from holdfast.launch.interface import LEAVE_MARGIN, Ending, Job
from holdfast.launch.launch_log import LaunchLog
from holdfast.launch.orphan import VARIABLE as PARENT
from holdfast.launch.standby import LocalGang, Standby
from holdfast.launch.warm import WarmServer
from holdfast.runtime.environment import home, make_folder
from holdfast.runtime.locks import NO_LOCKS, no_locks
from holdfast.runtime.secrets import StreamRedactor, for_ranks

log = logging.getLogger("holdfast.launch")

TAIL_LINES = 40
BURIAL_SECONDS = 60.0  # for all that ends beside the next launch: torchrun has 30, and then tells what it has to
PIPE_BYTES = 2**20  # of what a launch prints and nobody has read: the most that a user gets
WRAPPER = "holdfast.launch.torchrun"
PROMPT = "holdfast.launch.node.prompt"  # its agent, which imports torch's


class LocalLauncher:
    """See `Launcher`. The gang lives in a session of its own, so that Ctrl-C reaches it only through `stop`, and
    dies with this process, so that no orphan goes on training."""

    def __init__(self, logs: Path) -> None:
        """`logs` is the folder for what the ranks print, a file for each launch."""
        self._logs = logs
        self._gang: LocalGang | None = None
        self._server: WarmServer | None = None
        self._standby = Standby(self._start_standby)
        self._burials: list[threading.Thread] = []
        self._stopping = False
        self._grace = 0.0

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:
        """See Launcher. Holds this machine's lock of the run."""
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
            try:
                yield
            finally:
                self.close()

    def adopt(self, run_id: str, launch: int) -> bool:  # noqa: ARG002
        """See Launcher. No gang outlives the launcher that started it."""
        return False

    def run(self, job: Job) -> Ending:
        """See Launcher. Call it from the main thread: the gang dies with the thread that started it. Where another
        launch may follow, it returns once the ranks have ended and what they handed over is committed: what is left
        ends beside that one. What a cloud said of the node is told last, and waited for."""
        self._grace = job.grace_seconds
        make_folder(self._logs)
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        path, told = self._log_of(job), self._ending_of(job)
        told.write_text("")
        gang = self._gang = self._standby.take(job) or self._started(job)
        with _killed_with_us(gang):
            if self._stopping:  # told between two launches
                self.stop()
            over = _keep(gang.output, path, tail)
            ending = parse_ending(told.read_text())  # none when torchrun itself was killed
            if over and ending is not None and ending.code >= 128 and not (ending.reclaimed or self._stopping):
                code = ending.code
                self._bury(gang, path)
            else:
                status = _followed(gang, path, tail)
                code = ending.code if ending else as_exit_code(status)
        blamed = frozenset({ending.node}) if ending is not None and ending.blames_node else frozenset[str]()
        detail = f"{ending.detail}. The log is {path}" if ending is not None and ending.detail else f"The log is {path}"
        cause = ending.cause if ending else None
        rank, attempt = (cause.rank, cause.attempt) if cause else (None, None)
        how = Ending(code, tuple(tail), detail, blamed, rank, attempt=attempt, elsewhere=False)
        if not how.retryable:
            self._standby.dismiss()
        return how

    def _bury(self, gang: LocalGang, path: Path) -> None:
        """Follow a launch that is over to its end, beside what comes next."""

        def work() -> None:
            try:
                _followed(gang, path, deque(maxlen=0))
            except OSError as error:
                log.warning("the last lines of launch %d are not in %s: %s", gang.job.launch, path, error)

        self._burials = [thread for thread in self._burials if thread.is_alive()]
        self._burials.append(threading.Thread(target=work, name="burial", daemon=True))
        self._burials[-1].start()

    def _log_of(self, job: Job) -> Path:
        return self._logs / f"launch-{job.launch:06d}.log"

    def _ending_of(self, job: Job) -> Path:
        return self._log_of(job).with_suffix(".ending.json")

    def _arguments(self, job: Job) -> list[str]:
        return [
            "--nnodes=1", f"--nproc-per-node={job.processes}", "--max-restarts=0", "--monitor-interval=0.05",
            f"--shutdown-timeout={max(1, int(job.grace_seconds))}", *job.command,
        ]  # fmt: skip

    def _environment(self, job: Job) -> dict[str, str]:
        return {
            **for_ranks(os.environ),
            **ACCELERATORS[job.cluster.accelerator].environment,
            **job.cluster.environment,
            **job.environment,
            "OMP_NUM_THREADS": str(job.threads),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            FILE_VARIABLE: str(self._ending_of(job)),
            PARENT: str(os.getpid()),
            # The memory of an accelerator is only free again when its ranks are gone.
            turn.OVERLAPS: "1" if ACCELERATORS[job.cluster.accelerator].device == "cpu" else "0",
        }

    def _started(self, job: Job) -> LocalGang:
        """Start the wrapper, and with it what it and its ranks print. It is forked from a process that has imported all
        that they need, so that a launch after a failure costs no import."""
        gang = self._start_warm(job)
        if gang is None:
            reader, writer = os.pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", WRAPPER, *self._arguments(job)], env=self._environment(job),
                    stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(writer)
            gang = LocalGang(job, process, _text(reader))
        self._standby.follow(gang)
        return gang

    def _start_warm(self, job: Job) -> LocalGang | None:
        """None where nothing can be started so."""
        modules = [WRAPPER, "torch.distributed.run", PROMPT, *(job.command[1:2] if job.command[0] == "-m" else ())]
        fresh = False
        while not fresh:  # a server may have been killed since the last launch
            try:
                if fresh := self._server is None:
                    self._server = WarmServer.spawn(
                        modules, self._environment(job), large_pages=job.standby is not None
                    )
                assert self._server is not None
                return self._forked(self._server, job, {turn.VARIABLE: turn.NOW})
            except OSError as error:
                log.debug("nothing starts warm: %s", error)
                self._close_server()
        return None

    def _start_standby(self, job: Job) -> LocalGang | None:
        """Start a launch before its turn; None where nothing starts warm."""
        server = self._server
        if server is None or self._stopping:
            return None
        try:
            gang = self._forked(server, job, turn.of_a_standby())
        except OSError as error:
            log.debug("nothing stands by: %s", error)
            return None
        gang.begun = False
        return gang

    def _forked(self, server: WarmServer, job: Job, more: Mapping[str, str]) -> LocalGang:
        reader, writer = os.pipe()
        with suppress(OSError):  # nobody reads what stands by before its turn
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        ours, theirs = socket.socketpair()
        environment = {**self._environment(job), **more}
        try:
            process = server.start(WRAPPER, self._arguments(job), environment, writer, writer, stdin=theirs.fileno())
        except BaseException:
            os.close(reader)
            ours.close()
            raise
        finally:
            os.close(writer)
            theirs.close()
        return LocalGang(job, process, _text(reader), ours)

    def close(self) -> None:
        """Let go of what launches are started from, of what stands by, and of what is left of those that are over."""
        self._standby.dismiss()
        deadline = time.monotonic() + BURIAL_SECONDS
        for thread in self._burials:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%g s were not enough to end a launch: what is left of it is killed", BURIAL_SECONDS)
        self._standby.close()
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
        self._standby.dismiss()


def _lock(lock: TextIO, run_id: str) -> None:
    """Take the lock, waiting for whoever trains the run."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        log.info("run %s is being trained by process %s on this machine: waiting for it", run_id, holder)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _followed(gang: LocalGang, path: Path, tail: deque[str]) -> int:
    """Follow a launch to its end, and keep what it still prints; its exit status."""
    with _killed_with_us(gang):
        try:
            with gang.output:
                while _keep(gang.output, path, tail):
                    pass
            status = gang.process.wait()
            if status < 0:  # what it led dies with it, in a moment; the next launch may need what that holds
                gang.wait_until_gone()
            return status
        finally:
            gang.hang_up()


def _keep(output: TextIO, path: Path, tail: deque[str]) -> bool:
    """Keep what a launch prints in the file `path`, until it says that it is over (True), or has ended."""
    redactor = StreamRedactor()
    with _naming(path), LaunchLog(path) as printed:
        for line in output:
            over, words = line.endswith(turn.OVER), redactor.line(line.removesuffix(turn.OVER))
            if words:
                printed.write(f"{words}\n" if over else words)
                tail.append(words.rstrip("\n"))
            if over:
                return True
    return False


@contextmanager
def _killed_with_us(gang: LocalGang) -> Iterator[None]:
    """After an error here, a full disk under its log for one, nobody follows the gang any more."""
    try:
        yield
    except BaseException:
        gang.kill()
        gang.process.wait()
        gang.hang_up()
        with suppress(OSError):
            gang.output.close()
        raise


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of a write or a close does not say which file it was."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)
        raise


def _text(reader: int) -> TextIO:
    return os.fdopen(reader, encoding="utf-8", errors="replace")
