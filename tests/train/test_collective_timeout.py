"""A rank that never joins a collective: the others end after the timeout of the spec, with the code of a lost rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.launch.device import MEETING_VARIABLE
from holdfast.spec.errors import ExitCode

SECONDS = 6.0  # the shortest timeout of a spec: 0.1 minutes
RANK = """
import os, sys, time
import torch, torch.distributed as dist
from holdfast.collectives import noticing_lost_peers
from holdfast.rank.preemption import PreemptionSignal
from holdfast.rank.setup import meet
from holdfast.runtime.exits import exit_code_of
from tests.train.tiny_run import tiny_assignment

def train():
    meet(tiny_assignment("cluster.collective_timeout_minutes=0.1"), PreemptionSignal())
    ones = torch.ones(4)
    dist.all_reduce(ones)  # both join
    assert ones[0] == 2
    print("joined", flush=True)
    if os.environ["RANK"] == "1":
        sys.stdin.read()  # alive, with open connections, until the test ends it
    with noticing_lost_peers():  # as around the loop of a rank
        dist.all_reduce(ones)

code = exit_code_of(train)
os._exit(code)
"""


def test_a_rank_that_never_joins_a_collective_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                 MEETING_VARIABLE: str(tmp_path / "meeting"), "HOLDFAST_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    waits, hangs = ranks
    try:
        assert waits.stdout is not None and waits.stdout.readline() == "joined\n"
        start = time.monotonic()
        _, errors = waits.communicate(timeout=60)
        seconds = time.monotonic() - start
        assert hangs.poll() is None  # nothing but the timeout ended the other rank
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert waits.returncode == ExitCode.LOST_PEER, errors
    assert "another rank went away" in errors
    assert seconds >= SECONDS - 0.5
