"""A rank's exit is noticed immediately, and its peers do not stay."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.launch.exits import FOLDER_VARIABLE, RankExit, read_ranks
from holdfast.launch.node import fast_exit_agent
from holdfast.launch.node.fast_exit_agent import SAVING_SECONDS, end_survivors, wait_for_end
from holdfast.launch.processes import WarmServer
from holdfast.runtime import heartbeat
from holdfast.spec.errors import ExitCode
from holdfast.telemetry.phases import PHASES
from tests.launch.launched import launched
from tests.launch.test_local import job

LONG = 60.0  # seconds; no test waits that long
DEAF = """
import faulthandler, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for folder in sys.argv[1:]:
    faulthandler.register(signal.SIGUSR1, open(f"{folder}/{os.getpid()}.stacks", "wb", buffering=0))
def stuck():
    print("ready", flush=True)
    time.sleep(600)
stuck()
"""


@contextmanager
def deaf(count: int, *stacks: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that ignore SIGTERM, and write their stacks into a folder where one is given."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DEAF, *map(str, stacks)], stdout=subprocess.PIPE, start_new_session=True
        )
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def killed_in(seconds: float, victim: subprocess.Popen[bytes]) -> threading.Timer:
    timer = threading.Timer(seconds, victim.kill)
    timer.start()
    return timer


def open_files() -> Sequence[str]:
    return os.listdir("/proc/self/fd")  # noqa: PTH208


def test_a_wait_ends_with_the_first_process_and_leaves_no_descriptor_open() -> None:
    with deaf(2) as ranks:
        before, start = len(open_files()), time.monotonic()
        wait_for_end(ranks, 0.01)
        assert len(open_files()) == before
        timer = killed_in(0.2, ranks[1])
        wait_for_end(ranks, LONG)
        assert time.monotonic() - start < LONG / 2
        assert ranks[1].poll() == -signal.SIGKILL
        assert len(open_files()) == before
        wait_for_end(ranks, 0.01)  # a process whose end is known ends no further wait
        assert ranks[0].poll() is None
        timer.join()


@pytest.mark.slow
def test_a_wait_ends_with_a_process_that_was_forked_warm() -> None:
    server = WarmServer.spawn(["tests.launch.child"])
    try:
        child = server.start("tests.launch.child", ["wait"], os.environ)
        timer = threading.Timer(0.2, lambda: os.kill(child.pid, signal.SIGKILL))
        timer.start()
        start = time.monotonic()
        wait_for_end([child], LONG)
        assert time.monotonic() - start < LONG / 2
        assert child.poll() == -signal.SIGKILL  # the exit code is reported by then, not only seen by the kernel
        timer.join()
    finally:
        server.close()


def test_where_the_kernel_has_no_descriptors_of_processes_it_waits_and_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "pidfd_open", refused)
    with deaf(1) as ranks:
        timer = killed_in(0.0, ranks[0])
        timer.join()
        start = time.monotonic()
        wait_for_end(ranks, 0.2)
        assert time.monotonic() - start >= 0.2
        while ranks[0].poll() is None:
            wait_for_end(ranks, 0.01)


def test_survivors_that_do_not_leave_are_killed_soon_and_one_that_saves_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with deaf(3, tmp_path) as (dead, stuck, saves):
        page = heartbeat.publish(tmp_path, 0, [])
        page.enter(PHASES.index("save"), 7, time.monotonic())
        (tmp_path / f"{os.getpid()}{heartbeat.SUFFIX}").rename(tmp_path / f"{saves.pid}{heartbeat.SUFFIX}")
        dead.kill()
        dead.wait()
        record(tmp_path, stuck.pid)
        end_survivors([dead, stuck, saves], seconds=0.2, saving_seconds=1.5)
        assert (stuck.poll(), saves.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
        messages = [line for line in caplog.messages if "it is killed" in line]
        assert [int(line.split()[1]) for line in messages] == [stuck.pid, saves.pid], "each once, in this order"
        assert [seconds_in(line) >= least for line, least in zip(messages, (0.2, 1.5), strict=True)] == [True, True]
        stacks = [line for line in caplog.messages if line.startswith(f"the stacks of process {stuck.pid}:")]
        assert [" in stuck\n" in stack for stack in stacks] == [True]
        (ending,) = read_ranks(tmp_path)
        assert ending.code == ExitCode.LOST_PEER, "it is not the cause"


def test_stacks_of_all_stuck_ranks_are_requested_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    requests: list[set[int]] = []

    def requested(_: Path, who: Mapping[int, object], **__: float) -> dict[int, bytes]:
        requests.append(set(who))
        return {}

    monkeypatch.setattr(fast_exit_agent, "stacks_of", requested)
    with deaf(4) as (dead, *stuck):
        dead.kill()
        dead.wait()
        end_survivors([dead, *stuck], seconds=0.1)
        assert requests == [{process.pid for process in stuck}]


def record(folder: Path, pid: int) -> None:
    """The report of a rank that was part of the gang."""
    report = RankExit(rank=0, local_rank=0, pid=pid, node="n", attempt=1, began=time.time())
    (folder / f"{pid}.json").write_text(report.model_dump_json())


def seconds_in(line: str) -> float:
    return float(line.split(" did not leave in ")[1].split(maxsplit=1)[0])


def test_a_responsive_survivor_gets_only_sigterm() -> None:
    with deaf(1) as ranks, subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as listener:
        ranks[0].kill()
        ranks[0].wait()
        end_survivors([ranks[0], listener], seconds=LONG)
        assert listener.poll() == -signal.SIGTERM


@pytest.mark.slow
def test_a_gang_whose_rank_was_killed_does_not_wait_half_a_minute_for_one_that_hangs(tmp_path: Path) -> None:
    assert launched(tmp_path, job("ignore", "kill")).code == 137
    (message,) = (
        line for line in (tmp_path / "logs" / "launch-000001.log").read_text().splitlines() if "it is killed" in line
    )
    assert seconds_in(message) < SAVING_SECONDS
