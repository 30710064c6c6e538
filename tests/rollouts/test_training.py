"""Training on generated answers: the same bits after kills, and for any number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast.rollouts.records import recorded_steps, records_of_step
from holdfast.spec import Spec
from holdfast.store import Store, open_store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.rollouts.prompt_run import FIELDS, prompt_spec, write_prompts
from tests.train.ranks import identity_of, train_in_ranks, trained

ELASTIC = ("training.determinism=elastic",)
TWICE = ("training.grpo.updates=2", "training.steps=5", "checkpoint.every_steps=3")


def answers(store: Store, spec: Spec, salt: str = "") -> list[Any]:
    """The records of all steps."""
    run = identity_of(spec, salt)
    return [record for step in recorded_steps(store, run) for record in records_of_step(store, run, step)]


def overrides(*more: str) -> tuple[str, ...]:
    """The overrides of a run, for `train_in_ranks`."""
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


@pytest.mark.drill
def test_ranks_learn_from_the_same_answers_at_any_number(store: Store, tmp_path: Path) -> None:
    fields = overrides(*ELASTIC, "training.grpo.updates=2")
    assert train_in_ranks(1, store.url, tmp_path / "one", [(fields, "", None)]) == [""]
    assert train_in_ranks(2, store.url, tmp_path / "two", [(fields, "two", None), (fields, "changed", 1)]) == [
        "",
        "PreemptedError",
    ]
    assert train_in_ranks(1, store.url, tmp_path / "rest", [(fields, "changed", None)]) == [""]
    spec = prompt_spec(*ELASTIC, "training.grpo.updates=2")
    for salt in ("two", "changed"):
        assert trained(store, spec, salt) == trained(store, spec)
        assert answers(store, spec, salt) == answers(store, spec)


@pytest.mark.drill
def test_sharded_models_answer_at_any_number_of_ranks_and_like_whole_ones(store: Store, tmp_path: Path) -> None:
    """The strategy is part of the plan: its gradient norm is another sum. Only the first answers are those of DDP."""
    sharded, whole = (overrides(*ELASTIC, f"parallel.strategy={strategy}") for strategy in ("fsdp", "ddp"))
    runs = {"one": (sharded, 1), "whole": (whole, 1), "": (sharded, 2)}
    for salt, (fields, ranks) in runs.items():
        assert train_in_ranks(ranks, store.url, tmp_path / f"ranks{salt}", [(fields, salt, None)]) == [""]
    spec = prompt_spec(*ELASTIC, "parallel.strategy=fsdp")
    assert trained(store, spec) == trained(store, spec, "one")
    assert answers(store, spec) == answers(store, spec, "one")
    run = identity_of(prompt_spec(*ELASTIC, "parallel.strategy=ddp"), "whole")
    first = list(records_of_step(store, run, 1))
    assert len(first) == 2
    assert first == list(records_of_step(store, identity_of(spec), 1))


PLACES = ("generation", "between", "update")


def _killed(rank: int, size: int, url: str, folder: Path, place: str) -> Any:
    """Train as a rank that kills itself at `place`, in the third step."""
    import holdfast.engines.torch.engine as engine
    from holdfast.rank.answer_batches import AnswerBatches
    from tests.train import ranks

    calls = 0

    def dying_after(count: int, function: Any) -> Any:
        def wrapped(*given: Any, **named: Any) -> Any:
            nonlocal calls
            result = function(*given, **named)
            calls += 1
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    if place == "generation":
        AnswerBatches._lot = dying_after(5, AnswerBatches._lot)  # type: ignore[method-assign]
    elif place == "between":
        AnswerBatches._load = dying_after(3, AnswerBatches._load)  # type: ignore[method-assign]
    else:
        engine.update = dying_after(3, engine.update)
    return ranks._train_all(rank, size, url, folder, [(overrides(), place, None)], False, signal.SIGTERM)


@pytest.mark.drill
def test_a_rank_killed_anywhere_in_a_step_changes_no_bit(store: Store, tmp_path: Path) -> None:
    assert train_in_ranks(1, store.url, tmp_path / "whole", [(overrides(), "", None)]) == [""]
    spec, before = prompt_spec(), {}
    for place in PLACES:
        in_ranks(1, _killed, store.url, tmp_path / place, place, seconds=400)
        before[place] = [record.lot for record in records_of_step(store, identity_of(spec, place), 3)]
    assert before == {"generation": [0], "between": [0, 1], "update": [0, 1]}
    runs = [(overrides(), place, None) for place in PLACES]
    assert train_in_ranks(1, store.url, tmp_path / "rest", runs) == [""] * 3
    for place in PLACES:
        assert trained(store, spec, place) == trained(store, spec)
        assert answers(store, spec, place) == answers(store, spec), "no prompt is lost or repeated"
