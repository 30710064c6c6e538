"""Training on two machines over sshd ends with the bits of one machine, whatever is killed, and whoever connects."""

import ipaddress
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint import list_attempts, read_manifest
from holdfast.store import open_store
from tests.faults.nodes import HELD, PATIENCE
from tests.ssh.machines import ROOT, Machines, why_not
from tests.whole import small
from tests.whole.listeners import listening, open_to_others, unix_listeners
from tests.whole.submitting import until

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

STEPS = 80
LONG = {"training": {"steps": STEPS, "log_every": 20}, "checkpoint": {"every_steps": 20, "keep_last": 3}}
TWO_NODES = ("--set", "cluster.nodes={min: 2, max: 2}", "--set", "training.micro_batch=2")
LIKE_TWO_NODES = ("--set", "parallel.processes=2", "--set", "training.micro_batch=2")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines")) as started:
        yield started


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the undisturbed run, on this machine."""
    folder = tmp_path_factory.mktemp("calm")
    small.write_corpus(folder)
    small.write_spec(folder, **LONG)
    result = small.holdfast(folder, "spec.yaml", *LIKE_TWO_NODES)
    assert result.returncode == 0, result.stdout + result.stderr
    return digest_in(folder)


def digest_in(folder: Path) -> str:
    """The digest of the last checkpoint of the only run in a folder."""
    store = open_store((folder / "home/store").as_uri())
    return read_manifest(store, small.only(folder, "runs/*/result.json")["run_id"], STEPS).state_digest


def ranks_of(run: str) -> list[psutil.Process]:
    """The ranks that train a run; the agents and the processes that start them do not count."""
    ranks = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if HELD in words and run in words and not any("torchrun" in word for word in words):
                ranks.append(process)
    return ranks


@contextmanager
def strangers(machines: Machines, mark: Path) -> Iterator[None]:
    """Clients without a key at every address where processes of both machines listen. They stay connected."""
    attackers = []
    for machine in machines.machines:
        members = machines.processes_of(machine)
        addresses, sockets = listening(members), unix_listeners(members)
        own = {address for address, _ in addresses if not ipaddress.ip_address(address).is_loopback}
        assert own == {machine.address}, f"{machine.name} listens on {addresses}"
        assert {name for name in sockets if not name.startswith("/") or open_to_others(Path(name))} == set()
        words = [f"{address},{port}" for address, port in addresses]
        command = machines.inside(machine, sys.executable, "-m", "tests.whole.attacks", str(mark), *words)
        attackers.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for attacker in attackers:
        assert attacker.stdout is not None
        assert int(attacker.stdout.readline().split()[0]) > 0
    try:
        yield
    finally:
        for attacker in attackers:
            attacker.communicate()


def test_strangers_killed_ranks_a_killed_connection_and_a_killed_command_change_no_bit(
    machines: Machines, tmp_path: Path, calm: str
) -> None:
    small.write_corpus(tmp_path)
    small.write_spec(tmp_path, **LONG)
    holds = small.held(tmp_path, 25)
    options = ("spec.yaml", "--backend", "ssh", "--endpoint", str(machines.hosts), *TWO_NODES)
    process = small.start(tmp_path, *options, **machines.environment, **holds)
    try:
        store = open_store((tmp_path / "home/store").as_uri())
        until(saved_in(tmp_path, 20), PATIENCE)
        run = run_in(tmp_path)
        first_ranks = ranks_of(run)
        assert len(first_ranks) == 2
        with strangers(machines, tmp_path / "executed"):
            small.hold(tmp_path, 45)
            until(saved_in(tmp_path, 40), PATIENCE)
        assert not (tmp_path / "executed").exists()
        assert len(list_attempts(store, run)) == 1, "the strangers ended nothing"
        first_ranks[1].kill()
        until(lambda: len(list_attempts(store, run)) == 2, PATIENCE)
        small.hold(tmp_path, 65)
        until(saved_in(tmp_path, 60), PATIENCE)
        machines.connection_to("beta").kill()
        until(lambda: len(list_attempts(store, run)) == 3, PATIENCE)
    finally:
        process.kill()
        process.communicate()
    until(lambda: not ranks_of(run), PATIENCE)
    small.hold(tmp_path, STEPS)
    result = small.holdfast(tmp_path, *options, **machines.environment, **holds)
    assert result.returncode == 0, result.stdout + result.stderr
    assert digest_in(tmp_path) == calm
    assert small.holdfast(tmp_path, run, command="show").returncode == 0


def run_in(folder: Path) -> str:
    """The id of the only run in a folder; empty before it has begun."""
    return next((path.name for path in small.objects(folder, "runs/*")), "none")


def saved_in(folder: Path, step: int) -> Callable[[], bool]:
    """Whether the run in a folder has saved that step."""

    def is_saved() -> bool:
        try:
            read_manifest(open_store((folder / "home/store").as_uri()), run_in(folder), step)
        except Exception:  # noqa: BLE001 - not yet
            return False
        return True

    return is_saved
