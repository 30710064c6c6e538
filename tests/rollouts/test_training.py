"""Training on generated answers: the same bits after kills, and for any number of ranks."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint.retention import checkpoint_steps
from holdfast.dataset import Dataset
from holdfast.rollouts.records import recorded_steps, records_of_step
from holdfast.spec import Spec
from holdfast.spec.errors import DataError
from holdfast.store import Store
from holdfast.telemetry import read_history
from tests.checkpoint.ranks import in_ranks
from tests.rollouts.prompt_run import FIELDS, prompt_spec, prompt_words, train_with_code, turns_fields
from tests.train.ranks import Runs, identity_of, train_in_ranks, trained
from tests.train.test_worker import write_weights
from tests.train.tiny_run import DATASET_ID, write_dataset

ELASTIC = ("training.determinism=elastic",)
TWICE = ("training.grpo.updates=2", "training.steps=5", "checkpoint.every_steps=3")
LAG = ("training.grpo.lag=1",)
LORA = ("training.lora.rank=4", "training.grpo.kl_weight=0.05", "training.precision=bf16")
VARIANTS: tuple[tuple[str, ...], ...] = ((), TWICE, LAG)


def answers(store: Store, spec: Spec, salt: str = "") -> list[Any]:
    """The records of all steps."""
    run = identity_of(spec, salt)
    return [record for step in recorded_steps(store, run) for record in records_of_step(store, run, step)]


def overrides(*more: str) -> tuple[str, ...]:
    """The overrides of a run, for `train_in_ranks`."""
    return (*FIELDS, *more)


def test_a_held_out_prompt_without_room_for_an_answer_is_refused_before_the_first_step(
    store: Store, tmp_path: Path
) -> None:
    """One token less has room."""
    spec = prompt_spec()
    room = spec.model.context + 1 - spec.training.grpo.answer_tokens
    write_dataset(store, packed=prompt_words(), held_out=prompt_words(room + 1), kind="prompts", text="")
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [(overrides(), "", None)]) == ["DataError"]
    assert recorded_steps(store, identity_of(spec)) == []
    sizes = spec.training.grpo.answer_tokens, spec.model.context
    prompts = Dataset.open(store, DATASET_ID, tmp_path / "cache").prompts("validation")
    with pytest.raises(DataError, match=rf"split validation: prompt 11 has {room + 1} tokens, .* lower answer_tokens"):
        prompts.require_room(*sizes)
    assert Dataset.open(store, DATASET_ID, tmp_path / "cache").prompts().require_room(*sizes) == 3
    write_dataset(store, packed=prompt_words(), held_out=prompt_words(room), kind="prompts", text="")
    assert train_in_ranks(1, store.url, tmp_path / "fitting", [(overrides("training.steps=1"), "", None)]) == [""]


def test_ranks_train_without_held_out_prompts(store: Store, tmp_path: Path) -> None:
    """Only what reads held-out prompts refuses the empty split."""
    write_dataset(store, packed=prompt_words(), held_out=np.array([], np.int64), kind="prompts", text="")
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [(overrides("training.steps=1"), "", None)]) == [""]
    with pytest.raises(DataError, match=r"split validation: has no prompts; .* change data.validation_fraction"):
        Dataset.open(store, DATASET_ID, tmp_path / "cache").prompts("validation")


@pytest.mark.slow
def test_a_stopped_run_learns_from_the_same_answers(store: Store, tmp_path: Path) -> None:
    runs = [(overrides(*fields), salt, stop) for fields in VARIANTS for salt, stop in (("", None), ("cut", 1))]
    assert train_in_ranks(1, store.url, tmp_path / "first", runs) == ["", "PreemptedError"] * len(VARIANTS)
    again: Runs = [(fields, salt, None) for fields, salt, stop in runs if stop]
    assert train_in_ranks(1, store.url, tmp_path / "second", again) == [""] * len(VARIANTS)
    for fields in VARIANTS:
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
    policies = {fields: [record.policy for record in answers(store, prompt_spec(*fields))][::2] for fields in ((), LAG)}
    assert len(set(policies[()])) == 4
    first, second, *_ = policies[LAG]
    assert first == second == policies[()][0], "the second step learns from answers of the first weights"
    assert len(set(policies[LAG])) == 3


@pytest.mark.drill
def test_ranks_learn_from_the_same_answers_at_any_number(store: Store, tmp_path: Path) -> None:
    fields = overrides(*ELASTIC, "training.grpo.updates=2")
    assert train_in_ranks(1, store.url, tmp_path / "one", [(fields, "", None)]) == [""]
    two: Runs = [(fields, "two", None), (fields, "changed", 1), (fields, "grown", 1)]
    assert train_in_ranks(2, store.url, tmp_path / "two", two) == ["", "PreemptedError", "PreemptedError"]
    four: Runs = [(fields, "four", None), (fields, "grown", None)]
    assert train_in_ranks(4, store.url, tmp_path / "four", four) == ["", ""]
    assert train_in_ranks(1, store.url, tmp_path / "rest", [(fields, "changed", None)]) == [""]
    spec = prompt_spec(*ELASTIC, "training.grpo.updates=2")
    for salt in ("two", "four", "changed", "grown"):
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


@pytest.mark.slow
def test_a_stopped_run_with_an_environment_learns_from_the_same_answers(store: Store, tmp_path: Path) -> None:
    code = tmp_path / "code"
    fields = turns_fields(code)
    runs = [(overrides(*fields), salt, stop) for salt, stop in (("", None), ("cut", 1))]
    assert in_ranks(1, train_with_code, store.url, tmp_path / "first", runs, code) == [["", "PreemptedError"]]
    rest = [(overrides(*fields), "cut", None)]
    assert in_ranks(1, train_with_code, store.url, tmp_path / "second", rest, code) == [[""]]
    spec = prompt_spec(*fields)
    assert trained(store, spec) == trained(store, spec, "cut")
    assert answers(store, spec) == answers(store, spec, "cut")
    found = [answer for record in answers(store, spec) for unit in record.units for answer in unit.answers]
    assert not any(answer.environment_error for answer in found)
    assert {len(answer.replies) for answer in found} == {2}
    assert {tuple(answer.replies) for answer in found} == {((2, 3), (5, 6))}


def _of_another_generator(rank: int, size: int, url: str, folder: Path, runs: Runs) -> list[str]:
    """Train runs, as a rank whose records have other keys."""
    from holdfast.rank import answer_batches
    from tests.train import ranks

    answer_batches.GENERATOR_VERSION += 1
    return ranks._train_all(rank, size, url, folder, runs, False, signal.SIGTERM)


@pytest.mark.slow
def test_answers_that_another_plan_recorded_are_found_by_their_weights(store: Store, tmp_path: Path) -> None:
    """The weights before a checkpoint are gone, so their answers cannot be generated again."""
    runs = [(overrides(*LAG), salt, stop) for salt, stop in (("", None), ("cut", 1))]
    assert train_in_ranks(1, store.url, tmp_path / "first", runs) == ["", "PreemptedError"]
    rest = [(overrides(*LAG), "cut", None)]
    assert in_ranks(1, _of_another_generator, store.url, tmp_path / "second", rest) == [[""]]
    spec = prompt_spec(*LAG)
    assert trained(store, spec) == trained(store, spec, "cut")
    assert answers(store, spec) == answers(store, spec, "cut")


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
    runs: Runs = [(overrides(), place, None) for place in PLACES]
    assert train_in_ranks(1, store.url, tmp_path / "rest", runs) == [""] * 3
    for place in PLACES:
        assert trained(store, spec, place) == trained(store, spec)
        assert answers(store, spec, place) == answers(store, spec), "no prompt is lost or repeated"


@pytest.mark.slow
def test_records_are_collected_with_checkpoints(store: Store, tmp_path: Path) -> None:
    """Of the records, those of one step remain: the last one before the only checkpoint."""
    collected = overrides("training.grpo.keep_steps=1", "checkpoint.keep_last=1")
    runs = [(overrides(), "", None), (collected, "collected", 2)]
    assert train_in_ranks(1, store.url, tmp_path / "first", runs) == ["", "PreemptedError"]
    spec = prompt_spec()
    (stopped,) = checkpoint_steps(store, identity_of(spec, "collected"))
    assert stopped in (2, 3)
    assert recorded_steps(store, identity_of(spec, "collected")) == [stopped]
    assert train_in_ranks(1, store.url, tmp_path / "second", [(collected, "collected", None)]) == [""]
    assert recorded_steps(store, identity_of(spec, "collected")) == [4]
    assert recorded_steps(store, identity_of(spec)) == [1, 2, 3, 4]
    assert trained(store, spec, "collected") == trained(store, spec)


@pytest.mark.drill
def test_stopped_adapters_with_a_divergence_in_bf16_learn_from_the_same_answers(store: Store, tmp_path: Path) -> None:
    write_weights(tmp_path / "weights", store, seed=3)
    fields = (f"model.init_from={tmp_path / 'weights'}", *LORA)
    runs = [(overrides(*fields), "", None), (overrides(*fields), "cut", 1)]
    assert train_in_ranks(1, store.url, tmp_path / "first", runs) == ["", "PreemptedError"]
    assert train_in_ranks(1, store.url, tmp_path / "second", [(overrides(*fields), "cut", None)]) == [""]
    spec = prompt_spec(*fields)
    assert trained(store, spec) == trained(store, spec, "cut")
    assert answers(store, spec) == answers(store, spec, "cut")
    divergence = [row["objective.kl"] for row in read_history(store, identity_of(spec))]
    assert divergence[0] == 0
    assert divergence[-1] > 0
