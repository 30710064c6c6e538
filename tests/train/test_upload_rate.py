"""Saves keep to the upload rate of their host until a rank waits for them."""

import time
from pathlib import Path

import pytest

from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.rank.checkpoint_policy import upload_rate
from holdfast.store import open_store
from tests.checkpoint.saving import RUN, checkpointer, state, whole
from tests.train.tiny_run import tiny_assignment


def test_the_ranks_of_a_host_share_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert upload_rate(tiny_assignment("checkpoint.upload_mib_per_second=2").checkpoint) == 2**19
    assert upload_rate(tiny_assignment().checkpoint) is None


def test_a_save_is_held_to_the_rate_and_one_that_is_waited_for_is_not(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    writer = checkpointer(store, max_lag_steps=9, upload_rate=1.0)  # it would take minutes otherwise
    for step in (3, 6):
        writer.save(step, whole(state(step)), {})
    time.sleep(0.5)
    assert checkpoint_steps(store, RUN) in ([], [3])  # the first bytes need not wait
    writer.wait()
    assert checkpoint_steps(store, RUN) == [3, 6]
