"""The local launcher's launch that stands by, with real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from holdfast.launch import Job, LocalLauncher, standby, turn
from holdfast.launch.standby import LocalGang, Standby
from holdfast.spec.cluster import Cluster
from tests.faults.nodes import PATIENCE


def job(launch: int, name: str = "") -> Job:
    """One of two ranks of `tests.launch.standing`."""
    command = ["-m", "tests.launch.standing", name or f"launch-{launch}"]
    return Job(f"job-{launch}", "run", launch, command, 2, 1, 20.0, Cluster())


def ready() -> set[int]:
    """The ranks of this process that stand by."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        try:
            if each.cmdline()[1:4] == ["-m", turn.MODULE, "ready"]:
                found.add(each.pid)
        except psutil.Error:
            continue
    return found


def wait(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    """Whether it holds anything open: one that ends lets go of that first, and is a zombie, or gone, a moment later."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    except OSError:
        return False


def begun(folder: Path, launch: int) -> set[int]:
    """The ranks that have begun in a launch, by its log."""
    log = folder / f"launch-{launch:06d}.log"
    return set(map(int, re.findall(r"pid (\d+) begins", log.read_text()))) if log.exists() else set()


def killed(launcher: LocalLauncher, folder: Path, of: Job, stood_by: int = 2) -> set[int]:
    """Run a job, kill a rank of it once it and what stands by are there, and give the latter."""
    found: set[int] = set()

    def kill() -> None:
        wait(lambda: len(begun(folder, of.launch)) == 2 and len(ready()) == stood_by)
        found.update(ready())
        os.kill(min(begun(folder, of.launch)), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert launcher.run(of).code == 137
    thread.join()
    return found


def test_the_next_launch_is_the_one_that_stood_by_and_the_last_one_has_none(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path)
    there = killed(launcher, tmp_path, replace(job(1), standby=job(2)))
    assert killed(launcher, tmp_path, job(2), stood_by=0) == set()
    assert begun(tmp_path, 2) == there
    launcher.close()


@pytest.mark.parametrize(
    "other",
    [job(2, "changed"), replace(job(2), environment={"A": "b"}), job(3)],
    ids=["command", "environment", "launch"],
)
def test_what_stands_by_for_another_job_is_sent_away(tmp_path: Path, other: Job) -> None:
    launcher = LocalLauncher(tmp_path)
    there = killed(launcher, tmp_path, replace(job(1), standby=job(2)))
    processes = [psutil.Process(pid) for pid in there]
    killed(launcher, tmp_path, other, stood_by=0)
    assert not begun(tmp_path, other.launch) & there
    assert psutil.wait_procs(processes, PATIENCE)[1] == []
    launcher.close()


@pytest.mark.parametrize(
    ("lasting", "words"), [(600.0, "none takes its place"), (0.0, "another takes its place")], ids=["soon", "late"]
)
def test_one_that_dies_has_its_last_words_kept_and_counts_as_a_try_only_if_it_died_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lasting: float, words: str
) -> None:
    monkeypatch.setattr(standby, "TRIES", 1)
    monkeypatch.setattr(standby, "LASTING", lasting)
    launcher, another = LocalLauncher(tmp_path), words.startswith("another")

    def said() -> str:
        return "".join(record.getMessage() for record in caplog.records if "has died" in record.getMessage())

    def kill() -> None:
        try:
            wait(lambda: len(begun(tmp_path, 1)) == 2 and len(ready()) == 2)
            os.kill(min(there := ready()), signal.SIGKILL)
            wait(lambda: said() and not ready() & there and len(ready()) == 2 * another)
        finally:
            os.kill(min(begun(tmp_path, 1)), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert launcher.run(replace(job(1), standby=job(2))).code == 137
    thread.join()
    launcher.close()
    first, *last = said().splitlines()
    assert first == f"launch 2, which stood by, has died: {words}"
    assert any("another rank was killed" in line for line in last), last


def test_what_was_sent_away_says_nothing_of_how_the_launch_with_its_number_ended(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path)
    there = killed(launcher, tmp_path, replace(job(1), standby=job(2)))
    processes = [psutil.Process(pid) for pid in there]
    wrappers = [wrapper for each in processes if (wrapper := each.parent()) and (wrapper := wrapper.parent())]
    other, ranks, left = job(2, "changed"), set[int](), list[psutil.Process]()

    def kill() -> None:
        wait(lambda: len(begun(tmp_path, 2)) == 2)
        ranks.update(begun(tmp_path, 2))
        left.extend(psutil.wait_procs([*processes, *wrappers], PATIENCE)[1])
        server = psutil.Process(min(ranks)).parent()
        assert server is not None
        os.kill(server.ppid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert launcher.run(other).code == 137
    thread.join()
    assert left == []
    assert not any(map(lives, ranks))
    launcher.close()


def test_a_launcher_that_is_closed_leaves_nothing_that_stands_by(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path)
    there = killed(launcher, tmp_path, replace(job(1), standby=job(2)))
    processes = [psutil.Process(pid) for pid in there]
    launcher.close()
    assert psutil.wait_procs(processes, 0)[1] == []


class Died:
    """The process that leads a launch, which has died, to whom it concerns once `told`."""

    def __init__(self) -> None:
        self.told, self.pid = threading.Event(), 0

    def wait(self, timeout: float | None = None) -> int:
        assert self.told.wait(timeout)
        return 1

    def send_signal(self, _number: int) -> None:
        """It is dead."""


def test_none_is_made_ready_for_the_turn_that_begins_without_the_one_that_has_just_died(tmp_path: Path) -> None:
    lines, started, process = [socket.socketpair() for _ in range(2)], list[Job](), Died()

    def gang(of: Job, line: socket.socket, *, begun: bool) -> LocalGang:
        output = (tmp_path / f"{of.launch}").open("w+")
        return LocalGang(of, cast("Any", process), output, line, begun=begun)

    def start(of: Job) -> LocalGang:
        started.append(of)
        return gang(of, lines[1][0], begun=False)

    keeper = Standby(start)
    keeper.follow(gang(replace(job(1), standby=job(2)), lines[0][0], begun=True))
    lines[0][1].send(turn.TRAINS)
    wait(lambda: started)
    lines[1][1].close()
    wait(lambda: keeper._waiting is None)
    assert keeper.take(job(2)) is None
    process.told.set()
    lines[0][1].close()
    keeper.close()
    assert started == [job(2)]
