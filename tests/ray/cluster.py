"""A real Ray on this machine: nodes that are started as `ray start` starts them, bound to 127.0.0.1, with a token."""

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
from pathlib import Path

import psutil

from tests.faults.nodes import HELD
from tests.ports import free_port
from tests.whole.submitting import ROOT, until

ADDRESS = "127.0.0.1"  # of the dashboard
TOKEN = "RAY_AUTH_TOKEN"
GAVE_UP = "The current node timed out during startup"  # says Ray of itself


def missing() -> str:
    """Why no Ray is started here; empty if one is."""
    return "" if importlib.util.find_spec("ray") else "it is not installed: pip install 'holdfast[ray]'"


class RayNode:
    """What one `ray start --block` started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def processes(self) -> list[psutil.Process]:
        """All of them, its raylet, workers and what these started too."""
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def those_with(self, *words: str) -> list[psutil.Process]:
        """Its processes with all of `words` in their command lines."""
        processes = []
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                if all(text in command for text in words):
                    processes.append(process)
        return processes

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes that train a run that is held."""
        return self.those_with(f"{HELD} --run-id")

    def kill_raylet(self) -> None:
        """As the kernel does it when memory runs out; wait until nothing of the node is left."""
        processes = self.processes
        for raylet in self.those_with("raylet/raylet "):
            raylet.kill()
        ended, survivors = psutil.wait_procs(
            [process for process in processes if process.pid != self._process.pid], 120
        )
        assert ended and not survivors, survivors
        self._process.wait(120)

    def kill(self) -> None:
        """As a machine that loses its power: everything at once."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(120)

    def alive(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None


class RayCluster:
    """`with RayCluster(folder, environment) as ray`: a head without room for steps, and nodes. All that they write goes
    to the folder, and every process that they start carries their token, by which it is found again."""

    def __init__(self, folder: Path, environment: dict[str, str], nodes: int = 2) -> None:
        self._folder, self._dashboard = folder, free_port()
        self.endpoint = f"http://{ADDRESS}:{self._dashboard}"
        self._head = ""  # its address
        # Of the loopback, a node an address. At 127.0.0.1 itself Ray would listen on the machine's own address instead.
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
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "4",
            "RAY_agent_register_timeout_ms": "300000",  # a busy machine takes its time
            "RAY_worker_register_timeout_seconds": "300",
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
        """The variables of whoever submits to it."""
        variables = {name: self.environment[name] for name in ("RAY_AUTH_MODE", TOKEN)}
        return {**variables, "RAY_API_SERVER_ADDRESS": self.endpoint, "HOLDFAST_BACKEND": "ray"}

    def add_node(self) -> RayNode:
        """Another node, which has joined."""
        return self._joined(self._start_node(), self._start_node)

    def processes(self, *words: str) -> list[psutil.Process]:
        """What was started here or by what was, wherever it hangs now, with all of `words` in its command line."""
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
        """The processes that walk a DAG, or that of a run."""
        return self.processes("python -m holdfast.pipelines.backends.ray.driver", run)

    def launchers(self, run: str) -> list[psutil.Process]:
        """The processes that follow the gang of a run, beside its driver."""
        return self.processes("holdfast.pipelines.backends.ray.step train ", run)

    def _start_head(self) -> RayNode:
        """It has no room for steps."""
        port = free_port()
        self._head = f"{self._network}{len(self._started) + 1}:{port}"
        return self._start(
            "--head", f"--port={port}", f"--dashboard-host={ADDRESS}", f"--dashboard-port={self._dashboard}",
            "--num-cpus=0", "--include-dashboard=true",
        )  # fmt: skip

    def _start_node(self) -> RayNode:
        """Two cores and 4 GiB, as far as Ray knows."""
        node = self._start(f"--address={self._head}", "--num-cpus=2", f"--memory={4 * 2**30}")
        self.nodes.append(node)
        return node

    def _joined(self, node: RayNode, start: Callable[[], RayNode]) -> RayNode:
        """The node once it has joined; or another one, as an operator starts it, where Ray gave up after its own half a
        minute, which a busy machine needs."""
        end = time.monotonic() + 420
        while True:
            log = self._folder / f"node-{self._started.index(node)}.out"
            until(lambda printed=log, node=node: "Ray runtime started" in printed.read_text() or not node.alive(), 180)
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


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((ADDRESS, port), timeout=1):
        return True
    return False
