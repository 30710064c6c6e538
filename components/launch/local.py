"""The local launcher: torchrun on this machine."""

from __future__ import annotations

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

from holdfast.components.launch.accelerators import ACCELERATORS
from holdfast.components.launch.ending import FILE_VARIABLE, as_exit_code, parse_ending
from holdfast.components.launch.interface import Ending, Job
from holdfast.components.launch.orphan import VARIABLE as PARENT
from holdfast.components.runtime.environment import home

log = logging.getLogger("holdfast.launch")

TAIL_LINES = 40


class LocalLauncher:
    """See `Launcher`. The gang lives in a session of its own, so that Ctrl-C reaches it only through `stop`, and
    dies with this process, so that no orphan goes on training."""

    def __init__(self, logs: Path) -> None:
        """`logs` is the folder for what the ranks print, a file for each launch."""
        self._logs = logs
        self._process: subprocess.Popen[str] | None = None
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
            yield

    def adopt(self, run_id: str, launch: int) -> bool:  # noqa: ARG002
        """See Launcher. No gang outlives the launcher that started it."""
        return False

    def run(self, job: Job) -> Ending:
        """See Launcher. Call it from the main thread: the gang dies with the thread that started it."""
        self._grace = job.grace_seconds
        self._logs.mkdir(parents=True, exist_ok=True)
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        command = [
            sys.executable,
            "-m",
            "holdfast.components.launch.torchrun",
            "--nnodes=1",
            f"--nproc-per-node={job.processes}",
        ]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--max-restarts=0"]
        command += ["--monitor-interval=0.05", f"--shutdown-timeout={max(1, int(job.grace_seconds))}", *job.command]
        folder = Path(sys.executable).parent  # of ninja, for DeepSpeed
        environment = {
            **os.environ,
            **ACCELERATORS[job.cluster.accelerator].environment,
            **job.cluster.environment,
            **job.environment,
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "OMP_NUM_THREADS": str(job.threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            PARENT: str(os.getpid()),
        }
        path = self._logs / f"launch-{job.launch:06d}.log"
        told = path.with_suffix(".ending.json")
        told.write_text("")
        environment[FILE_VARIABLE] = str(told)
        with path.open("a", encoding="utf-8", buffering=1) as printed:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            try:
                if self._stopping:  # told between two launches
                    self.stop()
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    printed.write(line)
                    tail.append(line.rstrip("\n"))
                code = as_exit_code(self._process.wait())
            except BaseException:  # a full disk under the log, for one: nobody follows the gang any more
                _kill_session(self._process)
                self._process.wait()
                raise
        ending = parse_ending(told.read_text())  # none when torchrun itself was killed
        blamed = frozenset({ending.node}) if ending is not None and ending.blames_node else frozenset[str]()
        return Ending(ending.code if ending else code, tuple(tail), f"The log is {path}", blamed)

    def stop(self) -> None:
        """See Launcher."""
        self._stopping = True
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        timer = threading.Timer(self._grace + 5.0, lambda: _kill_session(process))
        timer.daemon = True
        timer.start()


def _kill_session(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
