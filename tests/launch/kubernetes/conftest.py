"""An emulated cluster for each test, and helpers that define what its pods do."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from holdfast.launch import GangExit, Job
from holdfast.launch.kubernetes import KubernetesLauncher, follow, lease
from holdfast.launch.kubernetes.output import LogFollower
from holdfast.spec.cluster import Cluster
from tests.cluster.api import Object
from tests.cluster.emulation import Emulation
from tests.faults.nodes import PATIENCE

RUN = "0123456789abcdef"
PENDING = 10  # minutes
SERVE = (
    "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(204)); print('ready', flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the launcher's waits."""
    monkeypatch.setattr(follow, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(lease, "RENEW", 0.3)
    monkeypatch.setattr(lease, "POLL", 0.2)
    Running.followers = []

    def followed(*arguments: object) -> LogFollower:
        Running.followers.append(LogFollower(*arguments))  # type: ignore[arg-type]
        return Running.followers[-1]

    monkeypatch.setattr(follow, "LogFollower", followed)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Emulation]:
    """An empty cluster."""
    with Emulation(tmp_path / "cluster") as emulation:
        yield emulation


def settings(**more: object) -> Cluster:
    """The cluster section: two nodes."""
    base = {"nodes": {"min": 2, "max": 2}, "pending_timeout_minutes": PENDING, "ttl_minutes": 60}
    return Cluster.model_validate({**base, **more})


def job(launch: int = 1, **more: object) -> Job:
    """One launch of the run."""
    name = f"holdfast-{RUN}-{launch}"
    command = ["-m", "holdfast.rank.worker", "--store", "s3://bucket/prefix"]
    return Job(name, RUN, launch, command, 1, 1, 5.0, settings(**more))


def python(code: str) -> list[str]:
    """The command of a pod that runs this Python code."""
    return [sys.executable, "-c", code]


def rank_of(pod: Object) -> int:
    """The number of the pod's node in the job."""
    return int(pod["metadata"]["labels"]["training.kubeflow.org/replica-index"])


def each(*codes: str) -> Callable[[Object], list[str]]:
    """Run one program in rank 0 and another in rank 1."""
    return lambda pod: python(codes[rank_of(pod)])


class Running:
    """A launcher that follows a launch in a thread."""

    followers: ClassVar[list[LogFollower]] = []  # of all launchers of the test

    def __init__(self, launcher: KubernetesLauncher, launch: Job) -> None:
        self.launcher = launcher
        self.ending: GangExit | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(launch,), daemon=True)
        self._thread.start()

    def _run(self, launch: Job) -> None:
        try:
            self.ending = self.launcher.run(launch)
        except Exception as error:  # noqa: BLE001
            self.error = error

    def wait_for(self, line: str) -> None:
        """Wait until the launcher has read a line of rank 0."""
        deadline = time.monotonic() + PATIENCE
        while not any(line in follower.tail for follower in self.followers if follower._api is self.launcher._api):
            assert self._thread.is_alive() and time.monotonic() < deadline, (self.followers, self.ending, self.error)
            time.sleep(0.01)

    def end(self) -> GangExit:
        """The ending of the launch."""
        self._thread.join(PATIENCE)
        if self.error is not None:
            raise self.error
        assert self.ending is not None, "it still follows"
        return self.ending


def in_vain(monkeypatch: pytest.MonkeyPatch, check: Callable[[], bool]) -> None:
    """Exceed the launcher's limit for waiting pods as soon as `check` holds."""
    offset = 60.0 * PENDING
    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + offset * check()))


def both_ready(cluster: Emulation) -> None:
    """Wait until each pod has printed that it is ready: from then on, SERVE exits with a special code."""

    def ready() -> bool:
        outputs = list(cluster.kubelet.printed.values())
        return len(outputs) == 2 and all(any("ready" in line for line in output.snapshot()[0]) for output in outputs)

    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, cluster.kubelet.printed
        time.sleep(0.01)
