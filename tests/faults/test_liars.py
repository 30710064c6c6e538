"""A wrong bit of the hardware is found within the digest interval and leaves no trace in the model."""

from pathlib import Path

import pytest

from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.spec import ExitCode, run_id
from holdfast.telemetry import read_events
from holdfast.telemetry.events import AttemptBegan, RankEnded
from tests.faults.killing import outcome
from tests.faults.test_agent import run_node
from tests.train.ranks import launch
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec, train_once


@pytest.mark.drill
def test_a_flipped_bit_ends_the_gang_at_the_next_digest_and_the_run_resumes_from_the_agreed_state(
    tmp_path: Path,
) -> None:
    knobs = ("training.steps=30", "parallel.processes=2", "checkpoint.every_steps=10", "checkpoint.digest_every=4")
    spec, store, calm = tiny_spec(*knobs), new_store(tmp_path / "store"), new_store(tmp_path / "calm")
    identity, number = run_id(spec, DATASET_ID), launch(store, spec)
    code, output = run_node(store, spec, number, tmp_path, "tests.faults.lying_worker", HOLDFAST_TEST_LIES="1:13")
    assert code == ExitCode.WRONG_ARITHMETIC, output
    rank_ends = [event for event in read_events(store, identity) if isinstance(event, RankEnded)]
    # The flip is at step 13, and every fourth step has a digest.
    assert all(event.reason.startswith("step 16: ") for event in rank_ends), rank_ends
    assert checkpoint_steps(store, identity) == [10]
    train_once(spec, store.url, tmp_path / "home")
    start_steps = [event.step for event in read_events(store, identity) if isinstance(event, AttemptBegan)]
    assert start_steps == [0, 10]
    train_once(spec, calm.url, tmp_path / "calm-home")
    assert outcome(store, spec)[1] == outcome(calm, spec)[1]
