"""A run on one machine listens to nobody outside of it, while its ranks train together."""

from __future__ import annotations

import ipaddress
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.whole.small import held, objects, start, write_corpus, write_spec

pytestmark = pytest.mark.timeout(600)
PATIENCE = 300.0  # seconds


def listening(root: psutil.Process) -> set[tuple[str, int]]:
    """The addresses at which a process and all that it started wait for connections."""
    found = set()
    for process in [root, *root.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            bound = connection.type != 1 and connection.laddr and not connection.raddr  # a datagram's
            if connection.status == psutil.CONN_LISTEN or bound:
                found.add((str(connection.laddr.ip), int(connection.laddr.port)))
    return found


def test_a_gang_on_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path, training={"micro_batch": 2}, checkpoint={"every_steps": 2})
    with start(tmp_path, "spec.yaml", "--set", "parallel.processes=2", **held(tmp_path, 3)) as process:
        deadline = time.monotonic() + PATIENCE
        while not objects(tmp_path, "runs/*/checkpoints/step-*.json"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = listening(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert found, "two ranks that meet over gloo listen somewhere"
    assert {address for address, _ in found if not ipaddress.ip_address(address).is_loopback} == set()
