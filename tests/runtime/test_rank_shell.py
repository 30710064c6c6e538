"""A command in the place of a rank has the rank's environment, although a forked process shows only a part of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.launch.processes import WarmServer
from holdfast.runtime.rank_shell import LEFT_OUT
from holdfast.runtime.secrets import for_ranks
from holdfast.spec.errors import ExitCode
from tests.runtime.launched_rank import ADDED
from tests.runtime.launched_rank import __name__ as RANK

RUN = "3f2a4b5c6d7e8f90"


@dataclass
class Rank:
    """A rank that runs: its number, its folder and its variables."""

    pid: int
    folder: Path
    variables: dict[str, str]

    def run(self, *command: str, rank: int = 1, run: str = RUN) -> subprocess.CompletedProcess[str]:
        """Run a command in its place, with the environment of another person's terminal."""
        program = [sys.executable, "-m", "holdfast.runtime.rank_shell", run, str(rank), str(self.pid), *command]
        environment = {"PATH": os.environ["PATH"], "OF_THE_TERMINAL": "1"}
        root = Path(__file__).parents[2]
        return subprocess.run(program, env=environment, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    """Rank 1 of a launch, whose launcher has a key that no rank gets."""
    folder = tmp_path_factory.mktemp("work")
    shared = {f"SHARED_{number}": f"value {number}\nand another line" for number in range(20)}
    launcher = {**os.environ, "WANDB_API_KEY": "a-key-of-the-tracker"}
    launch = {
        **for_ranks(launcher), **shared, "HOLDFAST_LAUNCH_KEY": "k" * 64, "HOLDFAST_EXIT_REPORT": "/report",
        "HOLDFAST_PARENT": str(os.getpid()),
    }  # fmt: skip
    before = Path.cwd()
    reading, writing = os.pipe()
    server = WarmServer.spawn([RANK], launch)
    try:
        os.chdir(folder)
        server.start(RANK, ["--run-id", RUN], launch, writing)
    finally:
        os.chdir(before)
    os.close(writing)
    with os.fdopen(reading) as output:
        pid = int(output.readline())
        variables = {**launch, **ADDED, "PWD": str(folder)}
        yield Rank(pid, folder, {name: value for name, value in variables.items() if name not in LEFT_OUT})
    server.close()


def test_a_command_has_exactly_the_environment_and_the_folder_of_the_rank(rank: Rank) -> None:
    print_all = "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"
    variables, folder = json.loads(rank.run(sys.executable, "-c", print_all).stdout)
    variables.pop("LC_CTYPE", None)  # Python sets it where no locale is set
    assert variables == rank.variables
    assert folder == str(rank.folder)
    shown = Path(f"/proc/{rank.pid}/environ").read_text()
    assert "SHARED_19" not in shown  # so another process of the launch has shown it


def test_the_exit_code_is_that_of_the_command(rank: Rank) -> None:
    assert rank.run("bash", "-c", "exit 37").returncode == 37
    missing = rank.run("no-such-program")
    assert (missing.returncode, missing.stderr) == (127, "error: no-such-program: No such file or directory\n")


def test_without_a_command_it_is_a_shell(rank: Rank) -> None:
    shell = subprocess.run(
        [sys.executable, "-m", "holdfast.runtime.rank_shell", RUN, "1", str(rank.pid)],
        input="echo rank $RANK in $PWD\nexit 5\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (shell.returncode, shell.stdout) == (5, f"rank 1 in {rank.folder}\n")


def test_a_process_that_is_not_the_rank_is_not_entered(rank: Rank) -> None:
    refused = [rank.run("true", rank=0), rank.run("true", run="another")]
    rank_of_nothing = Rank(4_000_000, rank.folder, {}).run("true")
    for result in (*refused, rank_of_nothing):
        assert result.returncode == ExitCode.NOT_FOUND
        assert "cannot be entered" in result.stderr
    assert "it is another process now" in refused[0].stderr
    assert "No such file or directory" in rank_of_nothing.stderr
