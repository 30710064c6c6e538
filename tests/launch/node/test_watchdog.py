"""A node's watchdog: what follows a hang is watched too, and the other nodes learn that its ranks have exited."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import TCPStore

from holdfast.launch.node import hang_consensus, stacks
from holdfast.launch.node import watchdog as watchdog_module
from holdfast.launch.node.hang_consensus import HangConsensus
from holdfast.launch.node.hangs import Watched
from holdfast.launch.node.output import NodeEvents
from holdfast.launch.node.stacks import STACKS, has_working_child
from holdfast.launch.node.watchdog import Watchdog, _Rank
from holdfast.runtime.heartbeat import SUFFIX, HeartbeatPage, Seen
from holdfast.telemetry.phases import PHASES, Phase
from tests.faults.nodes import PATIENCE
from tests.ports import free_port

PAGE = 4096
Start = Callable[[int, Phase], subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ranks of a gang of two, each asleep in a phase after some steps of a hundredth of a second."""
    started = []

    def start(rank: int, phase: Phase) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["sleep", "600"])
        started.append(process)
        with (tmp_path / f"{process.pid}{SUFFIX}").open("w+b") as file:
            file.truncate(PAGE)
            place = HeartbeatPage(mmap.mmap(file.fileno(), PAGE), PHASES.index("data"), (), rank, 2)
        for step in range(6):
            place.enter(PHASES.index("data"), step, 100.0 + step / 100)
        place.enter(PHASES.index(phase), 6, 100.1)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def of(rank: int, **more: str) -> dict[str, str]:
    """The environment of a rank."""
    return {"RANK": str(rank), **more}


def test_a_gang_restarted_in_place_after_a_hang_is_watched_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "STACK_SECONDS", 0.1)
    kept: dict[int, bytes] = {}
    watchdog = Watchdog(NodeEvents(), tmp_path, kept.__setitem__)
    for _ in range(2):  # attempts of the gang on this node
        waiter, hangs = start(0, "communication"), start(1, "data")
        os.kill(hangs.pid, signal.SIGSTOP)
        watchdog.follow(of(0), waiter.pid)
        watchdog.follow(of(1), hangs.pid)
        assert [rank_process.wait(PATIENCE) for rank_process in (waiter, hangs)] == [-signal.SIGKILL] * 2
    assert b"rank 1 hangs on" in kept[hangs.pid]
    last = start(0, "save"), start(1, "save")  # which hangs no rank, however late they are checked
    for rank, process in enumerate(last):
        watchdog.follow(of(rank), process.pid)
    assert watchdog.close() == "", "the hangs before are not how this attempt ended"


def test_exited_ranks_of_a_node_are_no_longer_reported_to_its_peers(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_consensus, "SECONDS", PATIENCE)
    host = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    gang = {
        "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(host.port),
    }  # fmt: skip
    other = HangConsensus({**gang, "GROUP_RANK": "1"})
    own_state = Watched(Seen(1, 2, 6, PHASES.index("leave"), False, 0, 1, (0.01,) * 6), 0.0)
    watchdog, process = Watchdog(NodeEvents(), tmp_path, lambda *_: None), start(0, "leave")
    watchdog.follow(of(0, GROUP_RANK="0", **gang), process.pid)

    def heard() -> list[int]:
        return [entry.seen.rank for _, entry in other.exchange([own_state], 0.0)]

    deadline = time.monotonic() + PATIENCE
    while heard() != [1, 0]:
        assert time.monotonic() < deadline, "nothing is heard of rank 0"
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE
    while heard() != [1]:
        assert time.monotonic() < deadline, "rank 0 is still counted"
        time.sleep(0.05)
    assert watchdog.close() == ""


# A rank with many threads, each with a deep stack: the stack of the main thread is written last. Another thread
# may write it: that thread gets a signal which the main thread blocks at the moment of its arrival. The other threads
# enter and leave no function meanwhile: faulthandler may not read frames that change.
CROWDED = """
import faulthandler, os, queue, signal, sys, threading
def wait(depth):
    if depth:
        wait(depth - 1)
    parked.put(None)
    held.acquire()
parked, held = queue.SimpleQueue(), threading.Lock()
held.acquire()
stacks = open(sys.argv[1], "wb", buffering=0)
faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
for _ in range(50):
    threading.Thread(target=wait, args=[20], daemon=True).start()
for _ in range(50):
    parked.get()
if sys.argv[2] == "another":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
while sys.argv[2] == "another" and not os.fstat(stacks.fileno()).st_size:
    pass
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
print("continues", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("writer", ["the main thread", "another"])
def test_the_stacks_of_a_rank_that_gets_no_core_while_it_writes_them_are_kept_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    monkeypatch.setattr(stacks, "STACK_SECONDS", PATIENCE)
    kept: dict[int, bytes] = {}
    watchdog = Watchdog(NodeEvents(), tmp_path, kept.__setitem__)
    command = [sys.executable, "-c", CROWDED, str(tmp_path / "stacks"), writer]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if writer == "the main thread":
            process.stdout.readline()
        stack_file = tmp_path / f"{process.pid}{STACKS}"
        (tmp_path / "stacks").rename(stack_file)
        keeping = threading.Thread(target=watchdog._keep_stacks, args=[[_Rank(0, process.pid, None)]])
        keeping.start()
        while not stack_file.stat().st_size:
            pass
        if writer == "another":
            process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # several checks
        process.send_signal(signal.SIGCONT)
        keeping.join()
        process.kill()
    assert kept[process.pid].endswith(b"in <module>\n")


@pytest.mark.parametrize(("command", "works"), [("while :; do :; done", True), ("sleep 600", False)])
def test_a_rank_whose_compiler_works_for_it_does_not_sleep(command: str, works: bool) -> None:
    rank = subprocess.Popen(["sh", "-c", f"sh -c '({command}) & wait' & wait"], start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while len(psutil.Process(rank.pid).children(recursive=True)) < 2 or has_working_child(rank.pid) != works:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def test_a_machine_that_slept_for_an_hour_has_hung_ranks_for_no_longer_than_two_looks(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock runs on while a laptop, or a virtual machine, is suspended; its ranks are suspended with it."""
    offset, looks, enough = [0.0], list[float](), threading.Event()

    def look(_self: Watchdog, _rank: _Rank, passed: float) -> None:
        offset[0] += 3600.0  # before the next check
        looks.append(passed)
        if len(looks) == 3:
            enough.set()

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + offset[0], time=time.time)
    monkeypatch.setattr(watchdog_module, "time", clock)
    monkeypatch.setattr(Watchdog, "_look", look)
    watchdog = Watchdog(NodeEvents(), tmp_path, lambda *_: None)
    watchdog._tick = 0.01
    process = start(0, "data")
    watchdog.follow(of(0), process.pid)
    assert enough.wait(PATIENCE)
    process.kill()
    process.wait()
    assert watchdog.close() == ""
    assert max(looks) <= 0.02

    passes: list[float] = []

    def exchange(known: list[Watched], passed: float) -> list[Watched]:
        passes.append(passed)
        return known

    watchdog._consensus = SimpleNamespace(exchange=exchange, verdict=lambda: None)  # type: ignore[assignment]
    watchdog._consensus_of = {}
    assert watchdog._agreed([], {}, 1e6) is None
    assert passes == [2 * watchdog_module.ASK_SECONDS]
