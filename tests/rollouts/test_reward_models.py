"""Reward models as rewards: the number at the last token of an answer, from the weights in the run id."""

import math
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from holdfast.collectives import Gang
from holdfast.components.evaluate import run as evaluate
from holdfast.components.train.step import _finish
from holdfast.dataset import Dataset
from holdfast.dataset.manifest import SplitName
from holdfast.dataset.vocabulary import ENDS, RECORD, UNCOUNTED
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import AnsweringEngine
from holdfast.model.decoder import Decoder
from holdfast.model.hub import first_weights_digest
from holdfast.model.initialise import initialise
from holdfast.rank.answer_batches import AnswerBatches
from holdfast.rewards.process import RewardProcess
from holdfast.rollouts.reward_models import RewardModels
from holdfast.spec import Spec, SpecError, run_id
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.model.tiny_model import export
from tests.rollouts.prompt_run import prompt_spec, write_prompts
from tests.rollouts.test_training import answers, overrides
from tests.train.ranks import train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, _tokenizer, new_store, tiny_spec, write_dataset

PROMPT, ANSWER = [60, 61], [62, 63, 0]


def write_reward_model(folder: Path, seed: int = 5, head: str = "scalar", vocabulary: int = VOCABULARY) -> Decoder:
    """Write a reward model of the shape of `tiny_run` into `folder`."""
    folder.mkdir(exist_ok=True)
    decoder = Decoder.empty(tiny_spec().model.model_copy(update={"head": head}), vocabulary)
    initialise(decoder, seed)
    export(folder, decoder)
    (folder / "tokenizer.json").write_bytes(_tokenizer())
    return decoder


def field_of(folder: Path) -> str:
    """The override that makes a reward model the second reward."""
    return f"training.grpo.rewards=[{{kind: regex}}, {{kind: model, model: '{folder}', weight: 10}}]"


@pytest.fixture
def dataset(store: Store, tmp_path: Path) -> Dataset:
    """The prompts of `prompt_run`."""
    return Dataset.open(store, write_prompts(store), tmp_path / "cache")


def models_of(spec: Spec, dataset: Dataset, longest: int = 9, digests: str | None = None) -> RewardModels:
    """The reward models of a spec on this machine, with the digests of their weights or other ones."""
    first_weights = first_weights_digest(spec) if digests is None else digests
    return RewardModels(spec.training, dataset, longest, torch.device("cpu"), first_weights)


def test_the_reward_is_the_number_at_the_last_token(dataset: Dataset, tmp_path: Path) -> None:
    decoder = write_reward_model(tmp_path / "scores")
    found = models_of(prompt_spec(field_of(tmp_path / "scores")), dataset).values(PROMPT, ANSWER)
    with torch.no_grad():
        numbers = decoder.eval()(torch.tensor([PROMPT + ANSWER]))
    assert isinstance(numbers, torch.Tensor)
    assert found == {1: float(numbers[0, -1])}
    assert len(set(numbers[0].tolist())) == 5, "each token has another number"


def test_a_model_that_does_not_fit_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "scores")
    spec = prompt_spec(field_of(tmp_path / "scores"))
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* has a context of 16, and .* may have 17 tokens"):
        models_of(spec, dataset, longest=17)
    digests = first_weights_digest(spec)
    write_reward_model(tmp_path / "scores", seed=6)
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* holds other weights"):
        models_of(spec, dataset, digests=digests)
    write_reward_model(tmp_path / "words", head="tokens")
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* predicts tokens"):
        models_of(prompt_spec(field_of(tmp_path / "words")), dataset)


def test_a_model_with_another_vocabulary_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "larger", vocabulary=VOCABULARY + 1)
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* has a vocabulary of 301, and the run one of 300; use "):
        models_of(prompt_spec(field_of(tmp_path / "larger")), dataset)
    write_reward_model(tmp_path / "other")
    spec, file = prompt_spec(field_of(tmp_path / "other")), tmp_path / "other" / "tokenizer.json"
    tokenizer = file.read_text(encoding="utf-8")
    file.write_text(tokenizer.replace('"word299"', '"word999"'), encoding="utf-8")
    with pytest.raises(
        DataError, match=r"rewards\.1\.model: .*'word299' has the id 299 in the run, and none in .*; use "
    ):
        models_of(spec, dataset)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* the tokenizer has no vocabulary"):
        models_of(spec, dataset)
    for damaged in ('{"model": null}', '{"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}'):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(DataError, match=r"rewards\.1\.model: .* is not one of Hugging Face tokenizers"):
            models_of(spec, dataset)
    file.unlink()
    assert models_of(spec, dataset).values(PROMPT, ANSWER).keys() == {1}


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("model", r"rewards\.0\.model: is missing"),
        ("{kind: model, use: 'mine.py:reward'}", r"rewards\.0\.model: is missing"),
        ("{kind: exact, model: p}", r"rewards\.0\.model.*: is not used by kind exact"),
        ("{kind: model, model: p, field: foo}", r"rewards\.0\.field.*: is not used by a reward model"),
        (
            "{kind: model, model: p, timeout_seconds: 9}",
            r"rewards\.0\.timeout_seconds.*: is not used by a reward model",
        ),
        ("{kind: model, model: p, memory_mib: 99}", r"rewards\.0\.memory_mib.*: is not used by a reward model"),
    ],
)
def test_fields_that_do_not_fit_the_kind_are_refused(reward: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        prompt_spec(f"training.grpo.rewards=[{reward}]")


def test_the_first_local_rank_compares_the_weights(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reward_model(tmp_path / "scores")
    spec = prompt_spec(field_of(tmp_path / "scores"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    models_of(spec, dataset, digests="++other")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(DataError, match="holds other weights"):
        models_of(spec, dataset, digests="++other")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_longest_prompt_of_both_splits_fits_before_the_first_step(
    store: Store, dataset: Dataset, tmp_path: Path, split: SplitName
) -> None:
    write_reward_model(tmp_path / "scores")
    spec = prompt_spec(field_of(tmp_path / "scores"), "model.context=64")
    other = new_store(tmp_path / "long")
    words = np.array([60 | UNCOUNTED] * 11 + [byte | RECORD | UNCOUNTED for byte in b"{}"])
    words[-1] |= ENDS
    write_dataset(other, packed=words, kind="prompts", text="")
    dataset._streams[split] = Dataset.open(other, DATASET_ID, tmp_path / "other")._streams[split]
    assignment = Assignment.of(spec, "run", DATASET_ID, first_weights_digest(spec))
    with (
        RewardProcess(spec.training.grpo.rewards) as rewards,
        pytest.raises(DataError, match=r"rewards\.1\.model: .* has a context of 16, and .* may have 17 tokens"),
    ):
        AnswerBatches(assignment, dataset, cast("Gang", None), cast("AnsweringEngine", None), store, rewards)


def test_the_weights_of_a_reward_model_are_part_of_the_run_id_and_their_place_is_not(tmp_path: Path) -> None:
    for name, seed in (("one", 5), ("same", 5), ("other", 6)):
        write_reward_model(tmp_path / name, seed)
    specs = {name: prompt_spec(field_of(tmp_path / name)) for name in ("one", "same", "other")}
    ids = {name: run_id(spec, DATASET_ID, "", first_weights_digest(spec)) for name, spec in specs.items()}
    assert ids["one"] == ids["same"] != ids["other"]


@pytest.mark.slow
def test_a_stopped_run_learns_from_the_same_rewards_of_a_model(store: Store, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "scores")
    given = overrides(field_of(tmp_path / "scores"), "training.steps=3")
    spec = prompt_spec(*given)
    assert train_in_ranks(1, store.url, tmp_path / "first", [(given, "", None), (given, "cut", 1)]) == [
        "",
        "PreemptedError",
    ]
    assert train_in_ranks(1, store.url, tmp_path / "second", [(given, "cut", None)]) == [""]
    assert trained(store, spec, "cut") == trained(store, spec)
    found = [answer for record in answers(store, spec) for unit in record.units for answer in unit.answers]
    assert found == [each for record in answers(store, spec, "cut") for unit in record.units for each in unit.answers]
    assert len({answer.rewards[1] for answer in found}) > len(found) // 2
    for answer in found:
        assert answer.reward == answer.rewards[0] + 10 * answer.rewards[1]


@pytest.mark.slow
def test_an_evaluation_scores_with_the_weights_that_the_run_read(store: Store, tmp_path: Path) -> None:
    write_reward_model(tmp_path / "scores")
    given = overrides(
        field_of(tmp_path / "scores"), "training.steps=1", "telemetry.trackers=[]", "evaluation.versus_champion=ignore"
    )
    spec = prompt_spec(*given)
    assert train_in_ranks(1, store.url, tmp_path / "ranks", [(given, "", None)]) == [""]
    weights = first_weights_digest(spec)
    identity = run_id(spec, DATASET_ID, "", weights)
    assert _finish(spec, Assignment.of(spec, identity, DATASET_ID, weights), store).first_weights == weights
    assert math.isfinite(evaluate(spec, identity, store).metrics["mean_reward"])
    write_reward_model(tmp_path / "scores", seed=6)
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* holds other weights .* than those the run id"):
        evaluate(prompt_spec(*given, "evaluation.max_prompts=2"), identity, store)
