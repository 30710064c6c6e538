"""The local launcher and its torchrun, with real processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from holdfast.launch import GangExit, Job, LocalLauncher
from holdfast.spec.cluster import Cluster
from holdfast.telemetry.channel import add_listener
from tests.faults.nodes import PATIENCE
from tests.launch.launched import launched
from tests.launch.metadata import Metadata
from tests.launch.worker import HELD


def job(*deeds: str, grace: float = 20.0, launch: int = 1) -> Job:
    arguments = [f"{rank}:{action}" for rank, action in enumerate(deeds)]
    command = ["-m", "tests.launch.worker", *arguments]
    return Job("job", "run", launch, command, len(deeds), 1, grace, Cluster(), environment={"GREETING": "hello"})


def run(folder: Path, *deeds: str) -> GangExit:
    return launched(folder, job(*deeds))


@pytest.mark.slow
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


@pytest.mark.slow
def test_output_of_ranks_is_appended_to_the_launch_log(tmp_path: Path) -> None:
    for _ in range(2):
        ending = launched(tmp_path, job("0", "0"))
        assert ending.code == 0
    lines = (tmp_path / "logs" / "launch-000001.log").read_text().splitlines()
    exit_lines = sorted(line for line in lines if "leaves" in line)
    assert exit_lines == ["rank 0 leaves: 0"] * 2 + ["rank 1 leaves: 0"] * 2
    assert {"rank 0 leaves: 0", "rank 1 leaves: 0"} <= set(ending.log_tail)


def test_a_launch_leaves_nothing_among_the_temporary_files(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launch = replace(job("wait", "203"), environment={"TMPDIR": str(temporary)})
    assert launched(tmp_path, launch).code == 203
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("deed", "code"), [("12", 12), ("kill", 137)])
def test_a_launch_ends_only_when_what_started_its_ranks_has_ended(tmp_path: Path, deed: str, code: int) -> None:
    marker, log = tmp_path / "held", tmp_path / "logs" / "launch-000001.log"
    launcher, endings = LocalLauncher(tmp_path / "logs"), list[GangExit]()

    def let() -> None:
        until(lambda: log.exists() and "is held" in log.read_text())
        assert not endings
        marker.touch()

    with closing(launcher), let_by(let):
        endings.append(launcher.run(replace(job(deed), environment={HELD: str(marker)})))
    assert [ending.code for ending in endings] == [code]
    assert log.read_text().endswith("the parent of the ranks continues\n")


def test_a_reclaim_notice_is_recorded_before_the_launch_ends(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "logs")

    def let() -> None:
        ready(tmp_path, 1)
        assert cloud.waited.wait(PATIENCE)
        cloud.preempt()

    with Metadata() as cloud, closing(launcher), let_by(let):
        variables = {"HOLDFAST_SPOT": "gcp", "HOLDFAST_METADATA_URL": cloud.url}
        assert launcher.run(replace(job("save"), environment=variables)).code == 204


def test_a_launch_whose_torchrun_was_killed_ends_when_no_process_of_it_is_left(tmp_path: Path) -> None:
    pids: list[int] = []

    def kill() -> None:
        pids.extend(ready(tmp_path, 2))
        rank = next(process for process in map(psutil.Process, pids) if process.name() != "sleep")
        server = rank.parent()  # a warm server
        assert server is not None
        os.kill(server.ppid(), signal.SIGKILL)

    with closing(LocalLauncher(tmp_path / "logs")) as launcher, let_by(kill):
        assert launcher.run(job("ignore", "parent")).code == 137
        assert not any(map(holds_files, pids))


def holds_files(pid: int) -> bool:
    """Whether a process has open files. A process that exits closes them first, and is then a zombie or gone."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    except OSError:
        return False


@contextmanager
def let_by(act: Callable[[], None]) -> Iterator[None]:
    """Run `act` in a thread meanwhile; its assertions must hold."""
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        yield
    acting.result()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ready(folder: Path, ranks: int) -> list[int]:
    """The process ids of the ranks of the first launch, once all have printed that they are ready."""
    log, deadline = folder / "logs" / "launch-000001.log", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        matches = re.findall(r"pid (\d+) ready", log.read_text()) if log.exists() else []
        if len(matches) == ranks:
            return [int(pid) for pid in matches]
        time.sleep(0.01)
    raise AssertionError("the ranks are not ready")


def stopped(folder: Path, *deeds: str, grace: float = 20.0) -> tuple[GangExit, list[int]]:
    """Stop the gang once it is ready. Returns its ending and its processes."""
    launcher, pids = LocalLauncher(folder / "logs"), list[int]()

    def stop() -> None:
        pids.extend(ready(folder, len(deeds)))
        launcher.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    ending = launcher.run(job(*deeds, grace=grace))
    thread.join()
    return ending, pids


def test_a_stopped_gang_returns_how_its_ranks_ended(tmp_path: Path) -> None:
    assert stopped(tmp_path / "one", "save", "save")[0].code == 204
    assert stopped(tmp_path / "other", "wait", "wait")[0].code == 143


def test_a_killed_rank_is_the_cause_even_if_torchrun_gets_sigterm_before_its_check(tmp_path: Path) -> None:
    def kill_one() -> None:
        victim = ready(tmp_path, 2)[0]
        torchrun = psutil.Process(victim).parent()
        assert torchrun is not None
        torchrun.suspend()
        os.kill(victim, signal.SIGKILL)
        torchrun.terminate()
        torchrun.resume()

    thread = threading.Thread(target=kill_one)
    thread.start()
    ending = launched(tmp_path, job("peer", "peer"))
    thread.join()
    assert ending.code == 137


TORCHRUN = """
import os, signal, sys
from holdfast.launch.torchrun import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)  # as an operator sends it to what is left of a job that has failed

late = Late()
code = main(["--standalone", "--nproc-per-node=1", "-m", "tests.launch.worker", "0:12"])
if {immediately}:
    del late
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("immediately", [True, False], ids=["immediately", "while the interpreter is taken down"])
def test_an_ended_gang_keeps_its_exit_code_after_a_late_sigterm(immediately: bool) -> None:
    program = TORCHRUN.format(immediately=immediately)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 12


def test_a_gang_that_does_not_stop_is_killed_after_its_grace(tmp_path: Path) -> None:
    ending, pids = stopped(tmp_path, "ignore", "save", grace=1.0)
    assert ending.retryable
    assert "rank 0 leaves" not in (tmp_path / "logs" / "launch-000001.log").read_text()
    assert_gone(pids)


def test_a_stop_between_two_launches_holds_for_the_next(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "logs")
    launcher.stop()
    assert launcher.run(job("wait")).code == 143


def test_a_failure_while_following_leaves_no_gang(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "launch-000001.log"
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    marked_job = replace(job("wait"), environment={"MARK": str(tmp_path)})
    with pytest.raises(OSError, match=f"No space.*{log}"):
        launched(tmp_path, marked_job)
    assert_gone([process.pid for process in psutil.process_iter() if is_marked(process, str(tmp_path))])


def is_marked(process: psutil.Process, mark: str) -> bool:
    """Whether the process has this variable in its environment."""
    with suppress(psutil.Error):
        return process.environ().get("MARK") == mark
    return False


def assert_gone(pids: list[int]) -> None:
    """Fail if one of the processes lives on for long."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, survivors = psutil.wait_procs(processes, timeout=PATIENCE)
    assert [process for process in survivors if process.status() != psutil.STATUS_ZOMBIE] == []


LAUNCH = """
import sys
from pathlib import Path
from holdfast.launch import LocalLauncher
from tests.launch.test_local import job
LocalLauncher(Path(sys.argv[1]) / "logs").run(job("ignore", "ignore"))
"""


@pytest.mark.slow
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path)]) as launcher:
        pids = ready(tmp_path, 2)
        torchrun = psutil.Process(pids[0]).parent()
        assert torchrun is not None
        launcher.kill()
        assert_gone([*pids, torchrun.pid])
        launcher.wait(PATIENCE)


def test_a_second_launcher_of_a_run_says_that_it_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    remove = add_listener(lambda event, _: heard.append(event.text))
    began = threading.Event()

    def second() -> None:
        with LocalLauncher(tmp_path).only_one("run"):
            began.set()

    with ThreadPoolExecutor(1) as threads:
        with LocalLauncher(tmp_path).only_one("run"):
            waiting = threads.submit(second)
            until(lambda: bool(heard))
            assert not began.is_set()
        waiting.result(timeout=PATIENCE)
    remove()
    assert heard == [f"run run is being trained by process {os.getpid()} on this machine; waiting until it ends"]


@pytest.mark.slow
def test_a_process_whose_parent_died_before_its_check_dies_too() -> None:
    code = "from holdfast.launch.processes import die_with_parent; die_with_parent(); print('lives on')"
    for parent, expected in ((str(os.getpid()), 0), ("1", -signal.SIGKILL), (None, 0)):
        environment = {key: value for key, value in os.environ.items() if key != "HOLDFAST_PARENT"}
        environment |= {"HOLDFAST_PARENT": parent} if parent else {}
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == expected


@pytest.mark.slow
def test_the_first_process_of_a_container_leaves_on_sigterm_before_it_has_started_a_rank() -> None:
    """No signal that process 1 does not handle ends it: a pod would stay until its grace period is over."""
    torchrun = [sys.executable, "-m", "holdfast.launch.torchrun", "--nproc-per-node=1"]
    result = subprocess.run(
        [*torchrun, "-m", "tests.launch.signaled_early"], capture_output=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 143  # from its own handler; -15 is that of a process that the signal has killed
