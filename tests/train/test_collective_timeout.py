"""A rank that never joins a collective: the others end after the timeout of the spec, with the code of a lost rank."""

import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.launch.device import MEETING_VARIABLE
from holdfast.spec.errors import ExitCode
from tests import warm

SECONDS = 6.0  # the shortest timeout of a spec: 0.1 minutes


def test_a_rank_that_never_joins_a_collective_ends_the_others_after_the_timeout(tmp_path: Path) -> None:
    ranks = [
        warm.popen(
            [sys.executable, "-m", "tests.train.missing_rank"],
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
