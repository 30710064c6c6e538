"""Two slots and more nodes than that: which nodes join the gang, which stand by, and how each exits."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from holdfast.spec import ExitCode
from tests import warm
from tests.faults.nodes import kill_family
from tests.ports import LAUNCH_KEY, free_port

STANDS = "this node is a spare"


class Gang:
    """Nodes with one rank each that form a gang of two at the node "host"."""

    def __init__(self, folder: Path, ends: int = 0) -> None:
        self.folder, self._ends, self._port = folder, ends, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            kill_family(process)

    def start(self, name: str) -> None:
        """Start a node."""
        command = [
            sys.executable, "-m", "holdfast.launch.torchrun", "--nnodes=2:2", "--nproc-per-node=1",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=seats",
            "--local-addr=127.0.0.1", "--monitor-interval=0.1", "--shutdown-timeout=5", "--max-restarts=5",
            f"--rdzv-conf=join_timeout=120,read_timeout=120,is_host={int(name == 'host')},spares=2",
            "-m", "tests.launch.node.seated",
        ]  # fmt: skip
        variables = {"FOLDER": str(self.folder), "NAME": name, "ENDS": str(self._ends), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **LAUNCH_KEY, **variables, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with (self.folder / f"{name}.log").open("wb") as output:
            self.processes[name] = warm.popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def seated(self, gang: str) -> dict[str, str]:
        """The rank of each node in the `first` or `second` gang."""
        path = self.folder / "gangs"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return {name: rank for label, name, rank in lines if label == gang}

    def log(self, name: str) -> str:
        """The output of a node."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait(self, there: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + 300
        while not there():
            logs = "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)
            assert time.monotonic() < deadline, f"{what} never came\n{logs}"
            time.sleep(0.1)

    def begin(self, *spares: str) -> None:
        """Two nodes form the gang, and the spares stand by."""
        self.start("host")
        self.start("second")
        self.wait(lambda: len(self.seated("first")) == 2, "the gang")
        for name in spares:
            self.start(name)
            self.wait(lambda name=name: STANDS in self.log(name), f"spare {name}")  # type: ignore[misc]

    def codes(self) -> dict[str, int]:
        """The exit code of each node."""
        (self.folder / "end").touch()
        return {name: process.wait(120) for name, process in self.processes.items()}


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    with Gang(tmp_path) as new_gang:
        yield new_gang


@pytest.mark.slow
def test_one_of_two_spares_takes_the_seat_of_a_lost_node_which_stands_by_when_it_is_back(gang: Gang) -> None:
    gang.begin("spare", "another")
    kill_family(gang.processes["second"])
    (gang.folder / "lost").touch()
    gang.wait(lambda: len(gang.seated("second")) == 2, "the second gang")
    gang.start("second")
    gang.wait(lambda: STANDS in gang.log("second"), "the lost node as a spare")
    assert gang.codes() == {"host": 0, "second": 0, "spare": 0, "another": 0}
    second_lines = [line for line in (gang.folder / "gangs").read_text().splitlines() if line.startswith("second")]
    assert len(second_lines) == 2, f"the gang met more often than once: {second_lines}"
    assert sorted(gang.seated("second").values()) == ["0/2", "1/2"]
    assert {"spare", "another"} & gang.seated("second").keys()


@pytest.mark.slow
def test_a_lost_or_stopped_spare_does_not_disturb_the_gang_and_an_unused_one_exits_with_zero(gang: Gang) -> None:
    gang.begin("spare", "another")
    kill_family(gang.processes.pop("spare"))
    gang.processes["another"].terminate()
    assert gang.processes.pop("another").wait(300) == ExitCode.TERMINATED
    gang.start("third")
    gang.wait(lambda: STANDS in gang.log("third"), "the third spare")
    assert gang.codes() == {"host": 0, "second": 0, "third": 0}
    assert gang.seated("first").keys() == {"host", "second"}
    assert not gang.seated("second")


@pytest.mark.slow
def test_a_spare_does_not_succeed_when_the_gang_fails(tmp_path: Path) -> None:
    """The operator treats a job as successful when one pod exited with 0."""
    with Gang(tmp_path, ends=ExitCode.BAD_DATA) as gang:
        gang.begin("spare")
        (gang.folder / "end").touch()
        spare = gang.processes["spare"].wait(120)  # while the host can still answer why there is no gang any more
        (gang.folder / "last").touch()
        codes = gang.codes()
    assert spare == ExitCode.LOST_PEER
    assert codes == {"host": ExitCode.BAD_DATA, "second": ExitCode.BAD_DATA, "spare": ExitCode.LOST_PEER}
