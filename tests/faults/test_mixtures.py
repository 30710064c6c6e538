"""Faults of processes and of the store in one training, in a seeded order: no bit changes. Also, a gang freezes while
another one takes over.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from holdfast.components.train.result import read_result
from holdfast.pipelines.chaos import disk, fault_run, processes
from holdfast.pipelines.chaos import faults as catalogue
from holdfast.pipelines.chaos.disk import Disk
from holdfast.pipelines.chaos.fault_run import Run, schedule
from holdfast.pipelines.chaos.faults import FAULTS, Clock
from holdfast.pipelines.chaos.processes import ranks_of
from holdfast.pipelines.chaos.proxy import FaultyProxy
from holdfast.spec import ExitCode, Spec, dump_spec, run_id
from holdfast.store import Store, open_store
from holdfast.telemetry import Event, read_events
from holdfast.telemetry.events import AttemptBegan, Progress, RankEnded, SaveCommitted, StepEnded
from tests import warm
from tests.faults.killing import HELD_TRAINING, held_at, outcome
from tests.faults.nodes import HELD, Held
from tests.train.tiny_run import DATASET_ID, new_store, start_training, tiny_spec, train_once, write_dataset

pytestmark = [pytest.mark.drill, pytest.mark.timeout(900)]

AHEAD = 5  # steps
KNOBS = (
    "training.global_batch=4",
    "checkpoint.every_steps=20",
    "cluster.restarts={budget: 1000, backoff_seconds: 0}",
)
ELSEWHERE = (
    "pipeline-killed",
    "clock-jumped",
)  # This is the train step alone. The clock orders its history.
ALL = sorted(name for name, fault in FAULTS.items() if name not in ELSEWHERE and not fault.refused())
TWO = ("parallel.processes=2", "parallel.strategy=fsdp")


def through(spec: Spec, store: Store, home: Path, faults: list[str], seed: int, proxy: FaultyProxy | None) -> None:
    """Train through all of `faults`. The training stays close to the step of the next fault."""
    home.mkdir()
    path = home / "spec.yaml"
    path.write_text(dump_spec(spec))
    command = [sys.executable, "-m", "tests.faults.held_training", "--spec", str(path), "--dataset-id", DATASET_ID]
    gate = Held(store, run_id(spec, DATASET_ID), home / "holds", lambda: True)
    gate.hold(AHEAD)
    environment = {
        "OMP_NUM_THREADS": "1", **gate.variables, **({} if proxy is None else {"AWS_ENDPOINT_URL": proxy.url}),
    }  # fmt: skip
    run = Run([*command, "--store", store.url], home / "disk", environment, home / "log.txt", start=warm.popen)
    planned = schedule(faults, spec.training.steps, seed)
    survived = run.go(planned, proxy, seed, lambda step: gate.hold(step + AHEAD) if isinstance(step, int) else None)
    assert [event.fault for event in survived] == [event.fault for event in planned], "over before all could happen"


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes milliseconds here, so waits are shorter too."""
    for name in ("FREEZE_SECONDS", "SLOW_SECONDS", "AWAY_SECONDS"):
        monkeypatch.setattr(catalogue, name, 0.3)
    monkeypatch.setattr(processes, "WORKERS", (HELD,))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with an undisturbed run of 100 steps."""
    folder = tmp_path_factory.mktemp("calm")
    store = new_store(folder / "store")
    train_once(tiny_spec(*KNOBS, *TWO, "training.steps=100"), store.url, folder / "home")
    return store


def test_all_faults_in_a_seeded_order_change_no_bit(tmp_path: Path, s3_endpoint: str, s3_url: str) -> None:
    spec = tiny_spec(*KNOBS, *TWO, "training.steps=300")
    calm, stormy = new_store(tmp_path / "calm"), open_store(s3_url)
    train_once(spec, calm.url, tmp_path / "calm-home")
    write_dataset(stormy)
    with FaultyProxy(s3_endpoint, seed=3) as proxy:
        through(spec, stormy, tmp_path / "home", ALL, 3, proxy)
    assert outcome(stormy, spec)[1] == outcome(calm, spec)[1]
    rank_ends = [event for event in read_events(stormy, run_id(spec, DATASET_ID)) if isinstance(event, RankEnded)]
    if "memory-limit" in ALL:
        assert ExitCode.OUT_OF_MEMORY in [event.code for event in rank_ends], "a rank without memory says so"


def require_same_state(spec: Spec, *stores: Store) -> None:
    """All runs reached the same bits, regardless of their clocks."""
    results = [read_result(store, run_id(spec, DATASET_ID)) for store in stores]
    assert len({result.state_digest for result in results if result is not None}) == 1 and None not in results


def test_a_clock_that_jumps_changes_no_bit(calm: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, stormy = tiny_spec(*KNOBS, *TWO, "training.steps=100"), new_store(tmp_path / "stormy")
    events: list[Event] = []  # recorded while the clock is wrong

    class Waits(Clock):
        """The clock is corrected only after the run has saved, lost a rank, and resumed training."""

        def jump(self, seconds: float) -> None:
            if (self._folder / "jumped").exists() and seconds == 0.0 and not events:
                gate = Held(stormy, run_id(spec, DATASET_ID), tmp_path / "home" / "holds", lambda: True)
                gate.let(45)
                ranks_of(psutil.Process())[1].kill()
                gate.let(65)
                events.extend(read_events(stormy, run_id(spec, DATASET_ID)))
            super().jump(seconds)
            (self._folder / "jumped").touch()

    monkeypatch.setattr(fault_run, "Clock", Waits)
    through(spec, stormy, tmp_path / "home", ["clock-jumped", "rank-killed"], 5, None)
    later = [event for event in events if event.time > time.time() + 1800]
    assert {AttemptBegan, Progress, SaveCommitted} <= {type(event) for event in later}
    require_same_state(spec, calm, stormy)


@pytest.mark.skipif(bool(disk.refused()), reason=disk.refused())
def test_a_training_on_a_full_disk_ends_with_no_space_and_resumes_to_the_same_bits(
    calm: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, stormy = tiny_spec(*KNOBS, *TWO, "training.steps=100"), new_store(tmp_path / "stormy")
    gate = Held(stormy, run_id(spec, DATASET_ID), tmp_path / "unused", lambda: True)

    def ended() -> list[StepEnded]:
        return [event for event in read_events(stormy, run_id(spec, DATASET_ID)) if isinstance(event, StepEnded)]

    class Waits(Disk):
        """The disk has space again only after the command has reported that it is full."""

        @contextmanager
        def full(self) -> Iterator[None]:
            with super().full():
                yield
                gate.wait(lambda: bool(ended()), "the end of the train step")

    monkeypatch.setattr(fault_run, "Disk", Waits)
    through(spec, stormy, tmp_path / "home", ["disk-full"], 5, None)
    first, *_, last = ended()
    assert (first.code, last.code) == (ExitCode.NO_SPACE, ExitCode.OK)
    assert f"{tmp_path / 'home' / 'disk' / 'logs'}" in first.reason
    assert outcome(stormy, spec)[1] == outcome(calm, spec)[1]
    assert list((tmp_path / "home" / "disk" / "logs").rglob("*.log")), "logs are kept"


@contextmanager
def standing_still(root: psutil.Process) -> Iterator[None]:
    """A process and all its descendants, stopped."""
    family = [root, *root.children(recursive=True)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):
                process.resume()


def test_a_gang_that_stood_still_while_another_machine_took_its_run_over_ends_and_changes_no_bit(
    calm: Store, tmp_path: Path
) -> None:
    spec, store = tiny_spec(*KNOBS, *TWO, "training.steps=100"), new_store(tmp_path / "store")
    gate = held_at(12, spec, store, tmp_path / "one")
    frozen = start_training(spec, store.url, tmp_path / "one", environment=gate.variables, module=HELD_TRAINING)
    try:
        gate.let(12)
        with standing_still(psutil.Process(frozen.pid)):
            train_once(spec, store.url, tmp_path / "another")  # another machine: a different home, and no shared lock
            digest = outcome(store, spec)[1]
            gate.hold(spec.training.steps)
        output, _ = frozen.communicate(timeout=300)
        assert frozen.returncode in (ExitCode.OK, ExitCode.FENCED), output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(frozen.pid, signal.SIGKILL)
    assert digest == outcome(calm, spec)[1] == outcome(store, spec)[1]
