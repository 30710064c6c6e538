"""The launcher over ssh with real nodes. The ssh command is a script that runs the remote command on this machine."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.launch import GangExit, Job
from holdfast.launch.ssh import launcher as launching
from holdfast.launch.ssh.hosts import Host
from holdfast.launch.ssh.launcher import SshLauncher
from holdfast.spec import ExitCode
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import MissingError
from tests.whole.submitting import until

# `ssh OPTIONS HOST COMMAND`: a host says by its name what happens to the connection.
SSH = """#!/bin/bash
for word; do host=$last; last=$word; done
case $host in
  away) echo "connect to host away: Connection refused" >&2; exit 255;;
  bare) echo "python: No such file or directory" >&2; exit 127;;
  silent) exec sleep 600;;
  *) echo "Welcome!"; exec bash -c "$last";;
esac
"""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script as the ssh command, of machines that meet on this one."""
    script = tmp_path / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    monkeypatch.setenv("HOLDFAST_SSH", str(script))


def job(*deeds: str) -> Job:
    """A job whose nodes have one rank each, which acts by its deed (`tests.launch.worker`)."""
    nodes = {"min": len(deeds), "max": len(deeds)}
    cluster = Cluster.model_validate({"nodes": nodes, "environment": {"GLOO_SOCKET_IFNAME": "lo"}})
    arguments = [f"{rank}:{deed}" for rank, deed in enumerate(deeds)]
    return Job("job", "run", 1, ["-m", "tests.launch.worker", *arguments], 1, 1, 5.0, cluster)


def launcher_of(folder: Path, *names: str) -> SshLauncher:
    return SshLauncher(folder / "logs", [Host(name, "127.0.0.1") for name in names])


def run(folder: Path, job: Job, *names: str) -> GangExit:
    return launcher_of(folder, *names).run(job)


def connections() -> list[psutil.Process]:
    """The processes of the ssh command that run: each became the node."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has ended, or nobody has asked how a child of another test ended
            if "holdfast.launch.ssh.node" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.slow
def test_a_machine_of_the_file_takes_the_place_of_one_that_does_not_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ending = run(tmp_path, job("0", "0"), "away", "first", "second")
    assert (ending.code, ending.elsewhere) == (ExitCode.OK, True)
    assert "away: no connection: connect to host away: Connection refused" in caplog.text
    lines = (tmp_path / "logs/launch-000001.log").read_text().splitlines()
    assert sorted(line for line in lines if "leaves" in line) == ["rank 0 leaves: 0", "rank 1 leaves: 0"]
    assert "Welcome!" not in lines


@pytest.mark.slow
def test_the_code_and_the_machine_of_the_cause_are_reported(tmp_path: Path) -> None:
    ending = run(tmp_path, job("202", "12"), "first", "second")
    assert (ending.code, ending.rank, ending.node, ending.elsewhere) == (ExitCode.DIVERGED, 1, 1, False)


def test_too_few_machines_are_a_launch_that_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "CONNECT_SECONDS", 2.0)
    ending = run(tmp_path, job("0", "0"), "silent", "first", "away")
    assert (ending.code, ending.retryable) == (ExitCode.RENDEZVOUS_TIMEOUT, True)
    assert ending.detail == "1 machines answered, and cluster.nodes.min is 2"
    until(lambda: not connections(), 30)


def test_a_machine_without_holdfast_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"bare: .*ended with 127 \(python: No such file or directory\)"):
        run(tmp_path, job("0"), "bare")


def test_a_machine_with_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "version", lambda _: "9.9.9")
    with pytest.raises(MissingError, match=r"first: has Holdfast 0\.1\.0, and this machine 9\.9\.9"):
        run(tmp_path, job("0"), "first")


@pytest.mark.slow
def test_a_stop_lets_the_ranks_save(tmp_path: Path) -> None:
    launcher, log = launcher_of(tmp_path, "first"), tmp_path / "logs/launch-000001.log"
    with stopped_when(launcher.stop, lambda: log.exists() and "ready" in log.read_text()):
        ending = launcher.run(job("save"))
    assert ending.code == ExitCode.PREEMPTED
    assert launcher.run(job("0")).code == ExitCode.TERMINATED  # nothing starts any more


@pytest.mark.slow
def test_a_lost_connection_ends_the_ranks_of_its_machine(tmp_path: Path) -> None:
    launcher, log = launcher_of(tmp_path, "first"), tmp_path / "logs/launch-000001.log"
    pids: list[int] = []

    def cut() -> None:
        pids.append(int(log.read_text().partition(" pid ")[2].split()[0]))
        for process in connections():
            process.kill()

    with stopped_when(cut, lambda: log.exists() and "ready" in log.read_text()):
        ending = launcher.run(job("wait"))
    assert (ending.code, ending.retryable) == (ExitCode.KILLED, True)
    assert "first did not say how it ended" in ending.detail
    until(lambda: not psutil.pid_exists(pids[0]), 30)


class stopped_when:  # noqa: N801 - reads as a statement
    """Call a function in a thread once a condition holds."""

    def __init__(self, act: Callable[[], object], condition: Callable[[], bool]) -> None:
        self._thread = threading.Thread(target=lambda: (until(condition, 120), act()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_a_machine_that_has_answered_gets_signs_of_life_while_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(launching, "CONNECT_SECONDS", 1.0)
    beaten: list[str] = []
    monkeypatch.setattr(launching._Node, "beat", lambda node: beaten.append(node.host.name))
    assert run(tmp_path, job("0", "0"), "silent", "good").code == ExitCode.RENDEZVOUS_TIMEOUT
    assert "good" in beaten
