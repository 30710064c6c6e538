"""A launch that stands by takes the place of one that was killed, and changes no bit; nothing of it is left, ever."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from holdfast.launch import turn
from holdfast.launch.launches import newest_launch
from holdfast.spec import ExitCode, run_id
from holdfast.store import Store, layout
from holdfast.telemetry import read_events
from holdfast.telemetry.event_log import PipeEvents
from holdfast.telemetry.events import AttemptBegan
from tests.faults.accounts import require_whole_ledger
from tests.faults.killing import (
    HELD_TRAINING,
    PATIENCE,
    Output,
    find_victim,
    followed,
    held_at,
    outcome,
    wait_for_victim,
)
from tests.faults.nodes import Held
from tests.faults.undisturbed import STEPS, undisturbed_end
from tests.train.tiny_run import DATASET_ID, PIPE_FILE, new_store, start_training, tiny_spec

HELD_AT = 10
COMMON = (f"training.steps={STEPS}", "parallel.processes=2", "checkpoint.every_steps=7")
STANDBY = "cluster.restarts.standby=true"  # in no identity
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@dataclass
class Training:
    """One that is held at a step until the test lets it go on, with a launch that stands by."""

    root: psutil.Process
    held: Held
    store: Store
    identity: str
    temporary: Path

    def wait(self, there: Callable[[], object]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE
        while not there():
            assert self.root.is_running() and time.monotonic() < deadline
            time.sleep(0.02)

    def ready(self) -> list[psutil.Process]:
        """The ranks that stand by, once they are."""
        found: list[psutil.Process] = []

        def there() -> bool:
            found[:] = [each for each in self.waiting() if "ready" in each.cmdline()]
            return len(found) == 2

        self.wait(there)
        return found

    def waiting(self) -> list[psutil.Process]:
        """The processes that stand by."""
        return [each for each in self.root.children(recursive=True) if turn.MODULE in _command(each)]

    def ranks(self) -> set[int]:
        """The process ids of the ranks that train."""
        ranks = (find_victim(self.root, name) for name in ("rank0", "rank1"))
        return {rank.pid for rank in ranks if rank is not None}

    def attempts(self) -> int:
        """How many gangs have formed."""
        return len([event for event in read_events(self.store, self.identity) if isinstance(event, AttemptBegan)])

    def left(self) -> list[Path]:
        """What lies among the temporary files, beside torch's cache of what it compiles."""
        return [each for each in self.temporary.iterdir() if not each.name.startswith("torchinductor_")]

    def finish(self) -> None:
        """Let it go on to its end."""
        self.held.hold(STEPS)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a run ends with to which nothing happens, and for which nothing stands by."""
    return undisturbed_end(tmp_path_factory)


@contextmanager
def training(folder: Path, code: int = 0) -> Iterator[Training]:
    """A training whose gang is held at HELD_AT, and ends with `code`. Whatever is done to it, nothing that stood by is
    left of it."""
    spec, store, temporary = tiny_spec(*COMMON, STANDBY), new_store(folder / "store"), folder / "tmp"
    temporary.mkdir()
    held = held_at(HELD_AT, spec, store, folder / "home")
    environment = {**held.variables, "TMPDIR": str(temporary)}
    process = start_training(spec, store.url, folder / "home", environment=environment, module=HELD_TRAINING)
    output = Output(PipeEvents(folder / "home" / PIPE_FILE))
    with followed(process, output) as reader:
        made = Training(psutil.Process(process.pid), held, store, run_id(spec, DATASET_ID), temporary)
        output.wait_for_step(HELD_AT)
        there = made.ready()
        yield made
        family = [*there, *made.waiting()]
        assert process.wait(PATIENCE) == code, "".join(output.lines)
        reader.join()
    assert [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    launches = newest_launch(store, made.identity)
    logs = (json.loads(store.get(info.key)) for info in store.list(layout.run(made.identity, "logs/"))
            if info.key.endswith(".json"))  # fmt: skip
    logged = {log["launch"] for log in logs}  # a torchrun that was killed keeps none
    assert logged and logged <= set(range(1, launches + 1))


@pytest.mark.parametrize("victim", ["rank0", "rank1", "torchrun"])
def test_the_launch_that_stood_by_goes_on_with_the_same_bits(victim, tmp_path, undisturbed):
    with training(tmp_path) as run:
        before, there = run.ranks(), {each.pid for each in run.ready()}
        wait_for_victim(run.root, victim).kill()
        run.wait(lambda: run.ranks() == there)
        assert not before & there
        assert not there & {each.pid for each in run.ready()}  # the next one
        run.finish()
    result, end = outcome(run.store, tiny_spec(*COMMON))
    assert (end, result.attempts) == (undisturbed, 2)
    require_whole_ledger(read_events(run.store, result.run_id), ranks=2)


@pytest.mark.parametrize("victim", ["rank", "torchrun"])
def test_one_that_dies_while_it_stands_by_is_replaced_and_harms_nobody(victim, tmp_path, undisturbed):
    with training(tmp_path) as run:
        ranks, there = run.ranks(), run.ready()
        wrapper = there[0].parent().parent()
        assert turn.MODULE in wrapper.cmdline()
        (there[0] if victim == "rank" else wrapper).kill()
        psutil.wait_procs([*there, wrapper], PATIENCE)
        again = {each.pid for each in run.ready()}
        assert not again & {each.pid for each in there}
        assert run.ranks() == ranks
        wait_for_victim(run.root, "rank1").kill()
        run.wait(lambda: run.ranks() == again)
        run.finish()
    result, end = outcome(run.store, tiny_spec(*COMMON))
    assert (end, result.attempts) == (undisturbed, 2)


def test_a_second_kill_before_another_launch_is_ready_costs_no_more_than_without(tmp_path, undisturbed):
    with training(tmp_path) as run:
        there = {each.pid for each in run.ready()}
        wait_for_victim(run.root, "rank0").kill()
        run.wait(lambda: run.ranks() & there)
        psutil.Process(next(iter(run.ranks() & there))).kill()  # it may have claimed nothing yet
        run.wait(lambda: run.ranks() and not run.ranks() & there)
        run.finish()
    assert outcome(run.store, tiny_spec(*COMMON))[1] == undisturbed
    assert newest_launch(run.store, run.identity) == 3


def test_asked_to_leave_what_stands_by_goes_too_and_leaves_nothing(tmp_path):
    with training(tmp_path, ExitCode.PREEMPTED) as run:
        run.root.send_signal(signal.SIGTERM)
    assert newest_launch(run.store, run.identity) == 1
    assert run.left() == []


def test_at_the_end_what_stands_by_goes_too_and_leaves_nothing(tmp_path, undisturbed):
    with training(tmp_path) as run:
        run.finish()
    assert newest_launch(run.store, run.identity) == 1
    assert outcome(run.store, tiny_spec(*COMMON))[1] == undisturbed
    assert run.left() == []
