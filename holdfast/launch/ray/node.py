"""Processes on the nodes of a Ray cluster, each owned by the Ray worker that started it.

A process dies with its worker, and so do the processes that it leads (see `launch.processes`). Ray kills its workers
silently, and does not know their children.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import ray

from holdfast.launch.exits import FILE_VARIABLE, as_exit_code
from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.runtime.node import free_port
from holdfast.runtime.output import printed_by
from holdfast.runtime.secrets import for_ranks
from holdfast.runtime.temporary import temporary_folder


def start(
    arguments: Sequence[str], environment: Mapping[str, str], inherited: Mapping[str, str] = os.environ
) -> subprocess.Popen[bytes]:
    """Start Python with `arguments`, with the variables of `inherited` and `environment`. It prints into a pipe. The
    calling thread must live as long as the process, because the kernel watches the thread."""
    variables = {**inherited, **environment, PARENT: str(os.getpid())}
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks signals, and children would inherit that
    try:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def address() -> str:
    """The address at which Ray knows this node: a machine may have several networks."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)


class Node:
    """The actor in one bundle of a gang."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_requested = threading.Event()

    def place(self) -> tuple[str, int, str]:
        """The address of this node, a free port on it, and its id."""
        return address(), free_port(), ray.get_runtime_context().get_node_id()

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str | tuple[int, str]]:
        """Run Python with `arguments`. Yields its output, and at the end its code and its exit report."""
        with temporary_folder() as folder:
            report_file = Path(folder) / "ending.json"
            report_file.touch()
            self._process = process = start(
                arguments, {**environment, FILE_VARIABLE: str(report_file)}, for_ranks(os.environ)
            )
            if self._stop_requested.is_set():
                self.stop()
            yield from printed_by(process)
            code = as_exit_code(process.wait())
            yield code, report_file.read_text()

    def stop(self) -> None:
        """Tell the process to save and leave."""
        self._stop_requested.set()
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
