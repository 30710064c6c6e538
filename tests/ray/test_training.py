"""Training on two nodes of a real Ray, with faults: every run ends with the digest of the undisturbed one."""

import ipaddress
import sys

import psutil
import pytest

from holdfast.checkpoint import read_manifest
from holdfast.spec import ExitCode
from tests.faults.nodes import HELD
from tests.ray.cluster import RayCluster
from tests.ray.conftest import STEPS, Calm
from tests.whole import small
from tests.whole.listeners import listening, unix_listeners
from tests.whole.submitting import until

STRETCH = 60  # steps that a gang computes before it stops and waits for a fault

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1800)]


class Disturbed:
    """A run with repeated faults. It waits for each of them, so no slow fault misses it."""

    def __init__(self, ray: RayCluster, calm: Calm, salt: str) -> None:
        self.ray, self.calm, self.place = ray, calm, calm.place
        self._folder = calm.place.folder / f"held-{salt}"
        self._folder.mkdir()
        hold_variables = ", ".join(f"{name}: '{value}'" for name, value in small.held(self._folder, 0).items())
        variables = f"--set=cluster.environment={{GLOO_SOCKET_IFNAME: lo, {hold_variables}}}"
        self.run = str(self.place.submit("--salt", salt, variables)["run_id"])
        self._attempt = self._allowed = 0  # the last attempt that trained; the step up to which it may compute

    def resume(self) -> int:
        """Wait until a new gang has saved, with the bits of the undisturbed run. Returns the step of its checkpoint."""
        self._allowed += STRETCH
        small.hold(self._folder, self._allowed)
        step = until(self._saved_by_another_gang, 600)
        assert step < STEPS, "it was over before it could be disturbed"
        self._attempt = self._attempt_of(step)
        assert self.place.digest(self.run, step) == self.calm.digest(step)
        return step

    def ends_as_the_calm_one(self) -> None:
        """The run succeeds, with the bits of the undisturbed one."""
        small.hold(self._folder, sys.maxsize)
        status = self.place.wait(self.run)
        assert status["state"] == "SUCCEEDED", self.place.logs(self.run)
        assert self.place.digest(self.run, STEPS) == self.calm.digest(STEPS)

    @property
    def launches(self) -> list[int]:
        """The exit codes of its launches, as far as a launcher recorded them."""
        return self.place.endings(self.run)

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks."""
        return self.ray.processes(f"{HELD} --run-id", self.run)

    def _saved_by_another_gang(self) -> int:
        """The newest step, if another gang than the previous one saved it: that one may have saved after the fault."""
        step = self.place.newest(self.run)
        return step if step and self._attempt_of(step) > self._attempt else 0

    def _attempt_of(self, step: int) -> int:
        return read_manifest(self.place.store, self.run, step).attempt


def test_a_killed_rank_a_killed_launcher_and_a_lost_node_cost_launches_and_no_bit(ray: RayCluster, calm: Calm) -> None:
    run = Disturbed(ray, calm, "kills")
    run.resume()
    # The ranks listen only on the addresses of their nodes. Ray's own processes are left out: a client of those can run
    # code, as Ray itself documents (docs/security.md).
    addresses, sockets = listening(run.ranks), unix_listeners(run.ranks)
    assert addresses, "ranks of two nodes listen somewhere"
    assert {address for address, _ in addresses if not ipaddress.ip_address(address).is_loopback} == set()
    assert {name for name in sockets if not name.startswith("/")} == set()
    run.ranks[0].kill()
    until(lambda: run.launches, 300)
    assert run.launches == [ExitCode.KILLED]
    run.resume()
    ranks, (launcher,) = run.ranks, ray.launchers(run.run)
    launcher.kill()
    assert not psutil.wait_procs(ranks, 120)[1], "what a launcher started dies with it"
    run.resume()
    assert run.launches == [ExitCode.KILLED], "no launcher saw the end of the second one"
    node_lost = next(node for node in ray.nodes if node.ranks)
    ray.nodes.remove(node_lost)
    node_lost.kill_raylet()
    ray.add_node()
    run.ends_as_the_calm_one()
    first, *killed, last = run.launches
    # Ray may place the next one on the lost node, which it still counts.
    assert killed and {first, *killed} == {ExitCode.KILLED}
    assert last == ExitCode.OK


def test_a_cancelled_run_and_one_with_a_killed_driver_resume(ray: RayCluster, calm: Calm) -> None:
    run = Disturbed(ray, calm, "resumed")
    before = run.resume()
    run.place.holdfast("stop", run.run)
    assert run.place.wait(run.run)["state"] == "CANCELED"
    assert before <= run.place.newest(run.run) < STEPS
    assert run.launches == [ExitCode.PREEMPTED]
    run.place.holdfast("resume", run.run)
    run.resume()
    ranks, (driver,) = run.ranks, ray.drivers(run.run)
    driver.kill()
    assert not psutil.wait_procs(ranks, 120)[1], "what a driver started dies with it"
    assert run.place.wait(run.run)["state"] == "FAILED"
    run.place.holdfast("resume", run.run)
    run.ends_as_the_calm_one()


def test_nothing_of_a_job_is_left(ray: RayCluster, calm: Calm) -> None:
    assert calm.status["state"] == "SUCCEEDED"
    until(lambda: not ray.processes("holdfast.components"), 120)
    until(lambda: not ray.drivers(), 120)
