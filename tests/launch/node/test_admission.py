"""A node joins a running elastic gang: the gang is interrupted once, and forms again with all of its nodes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from operator import ge
from pathlib import Path

import pytest

from tests import warm
from tests.faults.nodes import kill_family
from tests.launch.node.crowded import LOOKS
from tests.launch.node.leaver import END
from tests.ports import LAUNCH_KEY, free_port

NODES = 4


@pytest.mark.slow
def test_a_gang_of_slow_nodes_forms_again_once_and_complete(tmp_path: Path) -> None:
    port, nodes = free_port(), list[subprocess.Popen[bytes]]()

    def start() -> None:
        command = [
            sys.executable, "-m", "tests.launch.node.crowded", f"--nnodes=1:{NODES}", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=admission",
            "--local-addr=127.0.0.1", "--monitor-interval=0.1", "--shutdown-timeout=20", "--max-restarts=5",
            f"--rdzv-conf=join_timeout=120,read_timeout=120,last_call_timeout=3,is_host={int(not nodes)}",
            "-m", "tests.launch.node.leaver",
        ]  # fmt: skip
        variables = {"FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with (tmp_path / f"{len(nodes)}.log").open("wb") as output:
            nodes.append(
                warm.popen(command, env={**os.environ, **LAUNCH_KEY, **variables}, stdout=output, stderr=output)
            )

    def ranks() -> list[tuple[int, int]]:
        """The size of the gang, and the process id, of each rank that has started, in order."""
        path = tmp_path / "ranks"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(world), int(process)) for world, process in map(str.split, lines)]

    def worlds() -> list[int]:
        return [world for world, _ in ranks()]

    def looks() -> list[int]:
        """How often the agent of each node has looked for waiting nodes."""
        return [path.stat().st_size for path in sorted(tmp_path.glob(LOOKS))]

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            logs = "\n---\n".join(path.read_text(errors="replace") for path in tmp_path.glob("*.log"))
            assert time.monotonic() < deadline, f"{worlds()} {looks()}\n{logs}"
            time.sleep(0.1)

    def wait_for(world: int) -> None:
        wait_until(lambda: worlds()[-world:] == [world] * world)

    def wait_for_looks(number: int) -> None:
        """Wait until each agent has looked `number` times more. A node that waits is seen, and interrupts the gang."""
        wait_until(lambda: len(looks()) == NODES)
        enough = [count + number for count in looks()]
        wait_until(lambda: all(map(ge, looks(), enough)))

    try:
        for _ in range(NODES - 1):
            start()
        wait_for(NODES - 1)
        before = len(worlds())
        start()
        wait_for(NODES)
        wait_for_looks(20)
        for _, process in ranks()[-NODES:]:
            os.kill(process, END)
        assert [node.wait(120) for node in nodes] == [0] * NODES
    finally:
        for node in nodes:
            kill_family(node)
    assert worlds()[before:] == [NODES] * NODES
