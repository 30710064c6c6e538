"""Training on generated answers: the same bits after kills, and for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.rollouts.records import recorded_steps, records_of_step
from holdfast.spec import Spec
from holdfast.store import Store, open_store
from holdfast.telemetry import read_history
from tests.rollouts.prompt_run import prompt_spec, write_prompts
from tests.train.ranks import identity_of, train_in_ranks, trained

ELASTIC = ("training.determinism=elastic",)
TWICE = ("training.grpo.updates=2", "training.steps=5", "checkpoint.every_steps=3")


def answers(store: Store, spec: Spec, salt: str = "") -> list[Any]:
    """The records of all steps."""
    run = identity_of(spec, salt)
    return [record for step in recorded_steps(store, run) for record in records_of_step(store, run, step)]


def overrides(*more: str) -> tuple[str, ...]:
    """The overrides of a run, for `train_in_ranks`."""
    from tests.rollouts.prompt_run import FIELDS

    return (*FIELDS, *more)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the prompts."""
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    return store


def test_a_stopped_run_learns_from_the_same_answers(store: Store, tmp_path: Path) -> None:
    runs = [(overrides(*fields), salt, stop) for fields in ((), TWICE) for salt, stop in (("", None), ("cut", 1))]
    assert train_in_ranks(1, store.url, tmp_path / "first", runs) == ["", "PreemptedError"] * 2
    again = [(fields, salt, None) for fields, salt, stop in runs if stop]
    assert train_in_ranks(1, store.url, tmp_path / "second", again) == [""] * 2
    for fields in ((), TWICE):
        spec = prompt_spec(*fields)
        assert trained(store, spec) == trained(store, spec, "cut")
        assert answers(store, spec) == answers(store, spec, "cut")
    rows = read_history(store, identity_of(prompt_spec()))
    found = {name for name in rows[0] if name.startswith("objective.")}
    assert {"objective.reward", "objective.entropy", "objective.no_signal_share", "objective.clipped_share"} <= found
    rewards = [
        answer.reward for record in answers(store, prompt_spec()) for unit in record.units for answer in unit.answers
    ]
    assert set(rewards) > {0.0}
    clipped = [row["objective.policy_loss"] for row in read_history(store, identity_of(prompt_spec(*TWICE)))]
    assert clipped[0] != clipped[1], "the second update on the same answers has other ratios"
