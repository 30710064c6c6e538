"""When the state is saved: at the same steps on every rank, regardless of their clocks and without
effect on the bits.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.checkpoint import Attempt, claim_attempt, read_manifest
from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.collectives import Gang
from holdfast.launch.exits import LaunchExit
from holdfast.launch.launches import claim_launch, record_exit
from holdfast.planning.run_estimate import RANK_SECONDS_PER_FAILURE
from holdfast.rank.checkpoint_policy import CheckpointPolicy, Failures, failures_before
from holdfast.spec import ExitCode, run_id
from holdfast.spec.checkpoint import Checkpoint
from holdfast.store import Store, layout
from tests.checkpoint.ranks import in_ranks, process_group
from tests.train.ranks import Runs, train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec


class Clock:
    """A clock that a test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def walked(
    settings: Checkpoint,
    step_seconds: float,
    stall: float,
    steps: int,
    start: int = 0,
    failures: Failures | None = None,
) -> list[int]:
    """The steps after which a loop with these durations and stalls saves."""
    clock, saved_steps = Clock(), []
    cadence = CheckpointPolicy(settings, start=start, steps=steps, gang=Gang(), failures=failures, clock=clock)
    for step in range(start + 1, steps + 1):
        clock.now += step_seconds
        if cadence.due(step):
            saved_steps.append(step)
            clock.now += stall
            cadence.saved()
    return saved_steps


def test_checkpoints_by_steps_are_at_multiples_and_the_last_step_after_any_resume() -> None:
    assert walked(Checkpoint(every_steps=4), 1, 1, 10) == [4, 8, 10]
    assert walked(Checkpoint(every_steps=4), 1, 1, 10, start=5) == [8, 10]


def test_checkpoints_by_minutes_add_to_those_by_steps_and_count_from_the_last_save() -> None:
    assert walked(Checkpoint(every_steps=20, every_minutes=1), 10, 0, 40) == [6, 12, 18, 20, 26, 32, 38, 40]
    assert walked(Checkpoint(every_steps=4, every_minutes=1), 10, 0, 10) == [4, 8, 10]


def test_auto_saves_at_the_interval_of_young_and_daly_within_its_bounds() -> None:
    hourly = Failures(count=9, seconds=10 * 3600 - RANK_SECONDS_PER_FAILURE, ranks=1)  # one failure per hour
    saved_steps = walked(Checkpoint(every="auto", every_steps=10_000), 1, 0.5, 2000, failures=hourly)
    assert saved_steps[0] == 60  # until the first save has shown its cost
    best = math.sqrt(2 * 0.5 * 3600)  # 60 s
    assert all(abs(later - earlier - best) <= 2 for earlier, later in pairwise(saved_steps[1:9]))
    dear = walked(Checkpoint(every="auto", every_steps=10_000), 1, 8, 2000, failures=hourly)
    assert dear[3] - dear[2] == pytest.approx(4 * best, rel=0.05)
    assert walked(Checkpoint(every="auto", every_steps=25), 1, 0.5, 100, failures=hourly) == [25, 50, 75, 100]
    often = Failures(count=10**9, ranks=1)
    seconds_between = 10 * 2.0  # ten times the cost of a save, however often the run fails
    bounded = walked(Checkpoint(every="auto", every_steps=10_000), 1, 2, 300, failures=often)
    assert bounded[4] - bounded[3] == seconds_between


def test_steps_that_a_save_behind_them_slows_down_are_part_of_its_cost() -> None:
    clock = Clock()
    cadence = CheckpointPolicy(Checkpoint(every="auto", every_steps=20), start=0, steps=100, gang=Gang(), clock=clock)
    for step in range(1, 41):
        clock.now += 3 if 21 <= step <= 25 else 1  # the five steps during the first save are slower
        if cadence.due(step):
            clock.now += 0.5
            cadence.saved()
    mean = RANK_SECONDS_PER_FAILURE + clock.now - 100
    assert cadence.interval() == pytest.approx(math.sqrt(2 * (0.5 + 5 * 2) * mean))


def test_the_failures_of_a_run_are_its_unsuccessful_attempts(folder_store: Store) -> None:
    codes = [ExitCode.LOST_PEER, ExitCode.PREEMPTED, 137]
    for number, code in enumerate(codes, start=1):
        claim_launch(folder_store, "run", {})
        claim_attempt(folder_store, "run", launch=number)
        record_exit(folder_store, "run", number, LaunchExit.model_validate({"code": int(code), "blamed_nodes": []}))
    claim_launch(folder_store, "run", {})
    claim_attempt(folder_store, "run", launch=4)  # a gang that formed within the launch and was lost
    now = claim_attempt(folder_store, "run", launch=4)
    failures = failures_before(folder_store, now, ranks=8)
    assert (failures.count, failures.ranks) == (3, 8)
    assert failures.mean_seconds(0) == pytest.approx((RANK_SECONDS_PER_FAILURE / 8 + failures.seconds) / 4)
    assert failures_before(folder_store, Attempt("other", 1), 8) == Failures(0, 0.0, 8)


def _ranks_with_other_clocks(rank: int, size: int, folder: str) -> list[int]:
    clock, saved_steps = Clock(), []
    settings = Checkpoint(every_steps=50, every_minutes=1)
    with process_group(Path(folder) / "meeting", rank, size):
        cadence = CheckpointPolicy(settings, start=0, steps=30, gang=Gang(), clock=clock)
        for step in range(1, 31):
            clock.now += (10, 3600)[rank]  # on rank 1's clock, hours pass
            if cadence.due(step):
                saved_steps.append(step)
                cadence.saved()
    return saved_steps


def test_all_ranks_save_after_the_same_steps_with_different_clocks(tmp_path: Path) -> None:
    first, second = in_ranks(2, _ranks_with_other_clocks, str(tmp_path))
    assert first == second == [6, 12, 18, 24, 30]


@pytest.mark.slow
def test_when_a_run_saves_is_not_in_its_name_and_changes_no_bit(tmp_path: Path) -> None:
    often = ("checkpoint.every=auto", "checkpoint.every_minutes=0.001", "checkpoint.keep_last=99")
    fixed, timed = (tiny_spec("parallel.processes=2", *more) for more in ((), often))
    assert run_id(fixed, DATASET_ID) == run_id(timed, DATASET_ID)
    store = new_store(tmp_path / "store")
    runs: Runs = [(("parallel.processes=2",), "fixed", None), (("parallel.processes=2", *often), "timed", None)]
    assert train_in_ranks(2, store.url, tmp_path, runs) == ["", ""]
    assert trained(store, timed, "timed") == trained(store, fixed, "fixed")
    identity = run_id(timed, DATASET_ID, "timed")
    steps = checkpoint_steps(store, identity)
    assert steps[-1] == 12 and len(steps) > 1
    assert read_manifest(store, identity, 12).step == 12
    launch = json.loads(store.get(f"{layout.launches(identity)}000001.json"))
    assert launch["assignment"]["checkpoint"]["every"] == "auto"
