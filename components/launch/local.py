"""The local launcher: torchrun on this machine."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from holdfast.components.launch.accelerators import ACCELERATORS
from holdfast.components.launch.ending import FILE_VARIABLE, as_exit_code, parse_ending
from holdfast.components.launch.interface import LEAVE_MARGIN, Ending, Job
from holdfast.components.launch.orphan import VARIABLE as PARENT
from holdfast.components.launch.warm import WarmProcess, WarmServer
from holdfast.components.runtime.environment import home

log = logging.getLogger("holdfast.launch")

TAIL_LINES = 40
WRAPPER = "holdfast.components.launch.torchrun"
PROMPT = "holdfast.components.launch.node.prompt"  # its agent, which imports torch's


class LocalLauncher:
    """See `Launcher`. The gang lives in a session of its own, so that Ctrl-C reaches it only through `stop`, and
    dies with this process, so that no orphan goes on training."""

    def __init__(self, logs: Path) -> None:
        """`logs` is the folder for what the ranks print, a file for each launch."""
        self._logs = logs
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._server: WarmServer | None = None
        self._stopping = False
        self._grace = 0.0

    @contextmanager
    def only_one(self, run_id: str) -> Iterator[None]:
        """See Launcher. Holds this machine's lock of the run."""
        path = home() / "locks" / f"{run_id}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip()
                log.info("run %s is being trained by process %s on this machine: waiting for it", run_id, holder)
                fcntl.flock(lock, fcntl.LOCK_EX)
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
        """See Launcher. Call it from the main thread: the gang dies with the thread that started it."""
        self._grace = job.grace_seconds
        self._logs.mkdir(parents=True, exist_ok=True)
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        arguments = ["--nnodes=1", f"--nproc-per-node={job.processes}"]
        arguments += [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
        ]
        arguments += ["--monitor-interval=0.05", f"--shutdown-timeout={max(1, int(job.grace_seconds))}", *job.command]
        environment = {
            **os.environ,
            **ACCELERATORS[job.cluster.accelerator].environment,
            **job.cluster.environment,
            **job.environment,
            "OMP_NUM_THREADS": str(job.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            PARENT: str(os.getpid()),
        }
        path = self._logs / f"launch-{job.launch:06d}.log"
        told = path.with_suffix(".ending.json")
        told.write_text("")
        environment[FILE_VARIABLE] = str(told)
        with _naming(path), path.open("a", encoding="utf-8", buffering=1) as printed:
            self._process, output = self._start(job, arguments, environment)
            try:
                if self._stopping:  # told between two launches
                    self.stop()
                with output:
                    for line in output:
                        printed.write(line)
                        tail.append(line.rstrip("\n"))
                code = as_exit_code(self._process.wait())
            except BaseException:  # a full disk under the log, for one: nobody follows the gang any more
                _kill_session(self._process)
                self._process.wait()
                raise
        ending = parse_ending(told.read_text())  # none when torchrun itself was killed
        blamed = frozenset({ending.node}) if ending is not None and ending.blames_node else frozenset[str]()
        detail = f"{ending.detail}. The log is {path}" if ending is not None and ending.detail else f"The log is {path}"
        cause = ending.cause if ending else None
        rank, attempt = (cause.rank, cause.attempt) if cause else (None, None)
        code = ending.code if ending else code
        return Ending(code, tuple(tail), detail, blamed, rank, attempt=attempt, elsewhere=False)

    def _start(
        self, job: Job, arguments: list[str], environment: dict[str, str]
    ) -> tuple[subprocess.Popen[bytes] | WarmProcess, TextIO]:
        """Start the wrapper, and with what it and its ranks print. It is forked from a process that has imported all
        that they need, so that a launch after a failure costs no import."""
        reader, writer = os.pipe()
        try:
            started = self._start_warm(job, arguments, environment, writer) or subprocess.Popen(
                [sys.executable, "-m", WRAPPER, *arguments],
                stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(writer)
        return started, os.fdopen(reader, encoding="utf-8", errors="replace")

    def _start_warm(
        self, job: Job, arguments: list[str], environment: dict[str, str], output: int
    ) -> WarmProcess | None:
        """None where nothing can be started so."""
        modules = [WRAPPER, "torch.distributed.run", PROMPT, *(job.command[1:2] if job.command[0] == "-m" else ())]
        fresh = False
        while not fresh:  # a server may have been killed since the last launch
            try:
                if fresh := self._server is None:
                    self._server = WarmServer.spawn(modules, environment)
                assert self._server is not None
                return self._server.start(WRAPPER, arguments, environment, output, output)
            except OSError as error:
                log.debug("nothing starts warm: %s", error)
                self.close()
        return None

    def close(self) -> None:
        """Let go of what launches are started from."""
        if self._server is not None:
            self._server.close()
        self._server = None

    def stop(self) -> None:
        """See Launcher."""
        self._stopping = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        timer = threading.Timer(self._grace + LEAVE_MARGIN, lambda: _kill_session(process))
        timer.daemon = True
        timer.start()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of a write or a close does not say which file it was."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)
        raise


def _kill_session(process: subprocess.Popen[bytes] | WarmProcess) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
