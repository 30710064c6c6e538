"""The local launcher and its torchrun, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from holdfast.components.launch import Ending, Job, LocalLauncher
from holdfast.components.spec.cluster import Cluster


def job(*deeds: str, grace: float = 20.0, launch: int = 1) -> Job:
    arguments = [f"{rank}:{deed}" for rank, deed in enumerate(deeds)]
    command = ["-m", "tests.launch.worker", *arguments]
    return Job("job", "run", launch, command, len(deeds), 1, grace, Cluster(), {"GREETING": "hello"})


def run(folder: Path, *deeds: str) -> Ending:
    return LocalLauncher(folder / "logs").run(job(*deeds), lambda _: None)


@pytest.mark.parametrize(
    ("deeds", "code"),
    [
        (("205",), 205),
        (("raise",), 1),
        (("peer", "12"), 12),
        (("peer", "kill"), 137),
        (("wait", "203"), 203),
        (("wait", "term"), 143),
    ],
    ids=str,
)
def test_the_gang_ends_with_the_code_of_the_rank_that_was_the_cause(
    tmp_path: Path, deeds: tuple[str, ...], code: int
) -> None:
    assert run(tmp_path, *deeds).code == code


def test_what_the_ranks_print_is_passed_on_kept_and_appended(tmp_path: Path) -> None:
    lines: list[str] = []
    for _ in range(2):
        ending = LocalLauncher(tmp_path / "logs").run(job("0", "0"), lines.append)
        assert ending.code == 0
    heard = sorted(line for line in lines if "leaves" in line)
    assert heard == ["rank 0 leaves: 0"] * 2 + ["rank 1 leaves: 0"] * 2
    assert (tmp_path / "logs" / "launch-000001.log").read_text().splitlines() == lines
    assert {"rank 0 leaves: 0", "rank 1 leaves: 0"} <= set(ending.log_tail)


class Ready:
    """Waits until all ranks have said so; knows their process ids."""

    def __init__(self, ranks: int) -> None:
        self.pids: list[int] = []
        self.all = threading.Event()
        self._ranks = ranks

    def __call__(self, line: str) -> None:
        if found := re.search(r"pid (\d+) ready", line):
            self.pids.append(int(found[1]))
        if len(self.pids) == self._ranks:
            self.all.set()


def stopped(folder: Path, *deeds: str, grace: float = 20.0, times: int = 1) -> tuple[Ending, Ready]:
    """Stop the gang once it is ready."""
    launcher, ready = LocalLauncher(folder / "logs"), Ready(len(deeds))

    def stop() -> None:
        ready.all.wait(60)
        for _ in range(times):
            launcher.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    ending = launcher.run(job(*deeds, grace=grace), ready)
    thread.join()
    return ending, ready


def test_a_gang_that_is_asked_to_stop_says_how_it_left(tmp_path: Path) -> None:
    assert stopped(tmp_path, "save", "save")[0].code == 204
    assert stopped(tmp_path, "wait", "wait")[0].code == 143


def test_a_rank_that_was_killed_is_the_cause_also_when_torchrun_is_told_to_stop_before_it_looks(tmp_path: Path) -> None:
    ready = Ready(2)

    def kill_one() -> None:
        ready.all.wait(60)
        torchrun = psutil.Process(ready.pids[0]).parent()
        assert torchrun is not None
        torchrun.suspend()
        os.kill(ready.pids[0], signal.SIGKILL)
        torchrun.terminate()
        torchrun.resume()

    thread = threading.Thread(target=kill_one)
    thread.start()
    ending = LocalLauncher(tmp_path / "logs").run(job("peer", "peer"), ready)
    thread.join()
    assert ending.code == 137


TORCHRUN = """
import os, signal, sys
from holdfast.components.launch.torchrun import main
code = main(["--standalone", "--nproc-per-node=1", "-m", "tests.launch.worker", "0:12"])
os.kill(os.getpid(), signal.SIGTERM)  # as an operator sends it to what is left of a job that has failed
sys.exit(code)
"""


def test_a_gang_that_has_ended_keeps_its_code_when_it_is_told_to_stop_too_late() -> None:
    assert subprocess.run([sys.executable, "-c", TORCHRUN], check=False).returncode == 12


def test_a_gang_that_does_not_stop_is_killed_after_its_grace(tmp_path: Path) -> None:
    begun = time.monotonic()
    ending, ready = stopped(tmp_path, "ignore", "save", grace=1.0)
    assert time.monotonic() - begun < 40
    assert ending.retryable
    assert_gone(ready.pids)


def test_a_stop_between_two_launches_holds_for_the_next(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "logs")
    launcher.stop()
    assert launcher.run(job("wait"), lambda _: None).code == 143


def test_what_goes_wrong_while_following_leaves_no_gang_behind(tmp_path: Path) -> None:
    ready = Ready(1)

    def full(line: str) -> None:
        ready(line)
        if ready.all.is_set():
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        LocalLauncher(tmp_path / "logs").run(job("wait"), full)
    assert_gone(ready.pids)


def assert_gone(pids: list[int]) -> None:
    """Fails if one of the processes lives on for long."""
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, timeout=20)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


LAUNCH = """
import sys
from pathlib import Path
from holdfast.components.launch import LocalLauncher
from tests.launch.test_local import job
LocalLauncher(Path(sys.argv[1])).run(job("ignore", "ignore"), lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("victim", ["launcher", "torchrun"])
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path, victim: str) -> None:
    ready = Ready(2)
    with subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path)], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            ready(line)
            if ready.all.is_set():
                break
        torchrun = psutil.Process(ready.pids[0]).parent()
        assert torchrun is not None
        os.kill(launcher.pid if victim == "launcher" else torchrun.pid, signal.SIGKILL)
        assert_gone([*ready.pids, torchrun.pid])
        launcher.wait(20)


def test_a_process_whose_parent_died_before_it_could_ask_dies_too() -> None:
    code = "from holdfast.components.launch.orphan import die_with_parent; die_with_parent(); print('lives on')"
    for parent, expected in ((str(os.getpid()), 0), ("1", -signal.SIGKILL), (None, 0)):
        environment = {key: value for key, value in os.environ.items() if key != "HOLDFAST_PARENT"}
        environment |= {"HOLDFAST_PARENT": parent} if parent else {}
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == expected
