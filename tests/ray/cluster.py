"""A real Ray on this machine: nodes from `ray start`, bound to 127.0.0.1, with a token."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.faults.nodes import HELD
from tests.ports import free_port
from tests.whole.submitting import ROOT, until

ADDRESS = "127.0.0.1"  # of the dashboard
TOKEN = "RAY_AUTH_TOKEN"
GAVE_UP = "The current node timed out during startup"  # Ray's message


def missing() -> str:
    """Why Ray is not started here; empty if it is."""
    return "" if importlib.util.find_spec("ray") else "it is not installed: pip install 'holdfast[ray]'"


class RayNode:
    """The processes of one `ray start --block`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes of the node: its raylet, its workers and their children."""
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def those_with(self, *words: str) -> list[psutil.Process]:
        """The node's processes with all of `words` in their command lines."""
        processes = []
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                if all(text in command for text in words):
                    processes.append(process)
        return processes

    @property
    def ranks(self) -> list[psutil.Process]:
        """The training processes of a held run."""
        return self.those_with(f"{HELD} --run-id")

    def kill_raylet(self) -> None:
        """Kill the raylet, as the kernel does when memory runs out; wait until nothing of the node is left."""
        processes = self.processes
        for raylet in self.those_with("raylet/raylet "):
            raylet.kill()
        ended, survivors = psutil.wait_procs(
            [process for process in processes if process.pid != self._process.pid], 120
        )
        assert ended and not survivors, survivors
        self._process.wait(120)

    def kill(self) -> None:
        """Kill all processes of the node together, as a power loss does."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(120)

    def alive(self) -> bool:
        """Whether the node still runs."""
        return self._process.poll() is None


class RayCluster:
    """`with RayCluster(folder, environment) as ray`: a head without room for steps, and nodes. All their files are
    in the folder. Every process that they start carries their token, by which it is found."""

    def __init__(self, folder: Path, environment: dict[str, str], nodes: int = 2) -> None:
        self._folder, self._dashboard = folder, free_port()
        self.endpoint = f"http://{ADDRESS}:{self._dashboard}"
        self._head = ""  # its address
        # A loopback address for each node. At 127.0.0.1 itself Ray would listen on the machine's external address.
        self._network = f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}."
        self.environment = {
            **environment,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "RAY_AUTH_MODE": "token",
            TOKEN: secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # the memory of other processes on this machine ends no task
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
            "RAY_agent_register_timeout_ms": "300000",  # a busy machine is slow
            "RAY_worker_register_timeout_seconds": "300",
            "RAY_worker_niceness": "0",  # with Ray's 15, ranks get no processor while other tests run
        }
        self._started: list[RayNode] = []
        self._count = nodes
        self.nodes: list[RayNode] = []

    def __enter__(self) -> RayCluster:
        try:
            self._joined(self._start_head(), self._start_head)
            until(lambda: _listens(self._dashboard), 240)
            for _ in range(self._count):
                self._start_node()
            for node in list(self.nodes):
                self._joined(node, self._start_node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._started):
            node.kill()
        survivors = self.processes()
        for process in survivors:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(survivors, 120)
        assert not self.processes(), "processes of Ray are left"

    @property
    def client(self) -> dict[str, str]:
        """The variables of a client that submits to this Ray."""
        variables = {name: self.environment[name] for name in ("RAY_AUTH_MODE", TOKEN)}
        return {**variables, "RAY_API_SERVER_ADDRESS": self.endpoint, "HOLDFAST_BACKEND": "ray"}

    def add_node(self) -> RayNode:
        """Start another node, and wait until it has joined."""
        return self._joined(self._start_node(), self._start_node)

    def processes(self, *words: str) -> list[psutil.Process]:
        """The processes started here and all their descendants, with all of `words` in their command lines."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_own = process.environ().get(TOKEN) == self.environment[TOKEN]
                if is_own and process.status() != psutil.STATUS_ZOMBIE:
                    command = " ".join(process.cmdline())
                    if all(text in command for text in words):
                        processes.append(process)
        return processes

    def drivers(self, run: str = "") -> list[psutil.Process]:
        """The processes that run a DAG, or only that of one run."""
        return self.processes("python -m holdfast.pipelines.backends.ray.driver", run)

    def launchers(self, run: str) -> list[psutil.Process]:
        """The processes that follow the gang of a run, without its driver."""
        return self.processes("holdfast.pipelines.backends.ray.step train ", run)

    def _start_head(self) -> RayNode:
        """Start the head, without room for steps."""
        port = free_port()
        self._head = f"{self._network}{len(self._started) + 1}:{port}"
        return self._start(
            "--head", f"--port={port}", f"--dashboard-host={ADDRESS}", f"--dashboard-port={self._dashboard}",
            "--num-cpus=0", "--include-dashboard=true",
        )  # fmt: skip

    def _start_node(self) -> RayNode:
        """Start a node with two cores and 4 GiB, as far as Ray knows."""
        node = self._start(f"--address={self._head}", "--num-cpus=2", f"--memory={4 * 2**30}")
        self.nodes.append(node)
        return node

    def _joined(self, node: RayNode, start: Callable[[], RayNode]) -> RayNode:
        """The node once it has joined. Where Ray gave up after half a minute, which is too short on a busy machine,
        another node is started, as an operator does."""
        end = time.monotonic() + 420
        while True:
            log = self._folder / f"node-{self._started.index(node)}.out"
            until(partial(_started_or_ended, node, log), 180)
            if node.alive():
                return node
            assert GAVE_UP in log.read_text() and time.monotonic() < end, log.read_text()
            node.kill()
            if node in self.nodes:
                self.nodes.remove(node)
            node = start()

    def _start(self, *arguments: str) -> RayNode:
        number = len(self._started)
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
            f"--node-ip-address={self._network}{number + 1}",
            "--object-store-memory=100000000", f"--dashboard-agent-listen-port={free_port()}",
            f"--dashboard-agent-grpc-port={free_port()}", f"--runtime-env-agent-port={free_port()}",
            f"--metrics-export-port={free_port()}", f"--min-worker-port={11000 + 500 * (number % 20)}",
            f"--max-worker-port={11499 + 500 * (number % 20)}", f"--temp-dir={self._folder / str(number)}",
            "--disable-usage-stats", *arguments,
        ]  # fmt: skip
        with (self._folder / f"node-{number}.out").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        node = RayNode(process)
        self._started.append(node)
        return node


def _started_or_ended(node: RayNode, log: Path) -> bool:
    return "Ray runtime started" in log.read_text() or not node.alive()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((ADDRESS, port), timeout=1):
        return True
    return False
