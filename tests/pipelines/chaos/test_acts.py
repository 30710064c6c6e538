"""What some faults do to a process: its connections end, its clock is another one."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.pipelines.chaos.clock import Clock
from holdfast.pipelines.chaos.faults import FAULTS, LIMIT_SECONDS, Scene, _unlimitable
from holdfast.pipelines.chaos.network import cut, refused


@contextmanager
def child(code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys\n{code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
    ) as process:  # fmt: skip
        yield process


def ask(process: subprocess.Popen[str], word: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


CONNECTS = """
import socket
for port in sys.stdin:
    one = socket.create_connection(("127.0.0.1", int(port)), 60)
    print("connected", flush=True)
    print(len(one.recv(1)), flush=True)
"""


@pytest.mark.skipif(bool(refused()), reason=refused())
def test_only_what_connects_a_process_to_its_peers_is_cut_and_both_ends_see_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, child(CONNECTS) as peer, child("input()") as stranger:
        server.settimeout(60)
        assert ask(peer, str(server.getsockname()[1])) == "connected"
        ours, _ = server.accept()
        with ours:
            process, us = psutil.Process(peer.pid), psutil.Process()
            assert cut(process, [psutil.Process(stranger.pid)]) == 0
            assert cut(process, [us]) == 1
            ours.settimeout(60)
            assert ours.recv(1) == b""
            assert peer.stdout is not None
            assert peer.stdout.readline() == "0\n"


def test_a_clock_jumps_for_processes_that_run_and_only_for_them(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    says = "import time\nfor _ in sys.stdin: print(time.time(), time.time_ns(), flush=True)"
    with child(says, **clock.environment({})) as process:
        for offset in (0.0, 3600.0, -60.0, 0.0):
            clock.jump(offset)
            before = time.time()
            told, nanoseconds = ask(process).split()
            assert before + offset <= float(told) <= time.time() + offset
            assert abs(int(nanoseconds) / 1e9 - float(told)) < 60


RANK = """
import subprocess
says = "import time; print('there', flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", says, "holdfast.components.train.worker"], env={"RANK": "0"})
"""


@pytest.mark.skipif(bool(_unlimitable()), reason=_unlimitable())
def test_a_rank_that_needs_no_memory_gets_it_back_before_the_next_fault_is_due(tmp_path: Path) -> None:
    with child(RANK) as command:
        assert ask(command) == "there"
        (rank,) = psutil.Process(command.pid).children()
        before, limits = rank.rlimit(psutil.RLIMIT_AS), []

        def late() -> bool:
            limits.append(rank.rlimit(psutil.RLIMIT_AS)[0])
            return len(limits) == 2

        scene = Scene(psutil.Process(command.pid), None, Clock(tmp_path), random.Random(1), late)
        began = time.monotonic()
        assert "and needs none" in FAULTS["memory-limit"].act(scene)
        assert time.monotonic() - began < LIMIT_SECONDS
        assert limits == [0, 0]
        assert rank.rlimit(psutil.RLIMIT_AS) == before
        rank.kill()
