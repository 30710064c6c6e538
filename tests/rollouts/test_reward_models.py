"""Reward models as rewards: the number at the last token of an answer, from the weights in the run id."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.model.decoder import Decoder
from holdfast.model.hub import first_weights_digest
from holdfast.model.initialise import initialise
from holdfast.rollouts.reward_models import RewardModels
from holdfast.spec import Spec, SpecError, run_id
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.model.tiny_model import export
from tests.rollouts.prompt_run import prompt_spec
from tests.rollouts.test_training import answers, overrides
from tests.train.ranks import train_in_ranks, trained
from tests.train.tiny_run import DATASET_ID, VOCABULARY, tiny_spec

PROMPT, ANSWER = [60, 61], [62, 63, 0]


def write_reward_model(folder: Path, seed: int = 5, head: str = "scalar") -> Decoder:
    """Write a reward model of the shape of `tiny_run` into `folder`."""
    folder.mkdir(exist_ok=True)
    decoder = Decoder.empty(tiny_spec().model.model_copy(update={"head": head}), VOCABULARY)
    initialise(decoder, seed)
    export(folder, decoder)
    return decoder


def field_of(folder: Path) -> str:
    """The override that makes a reward model the second reward."""
    return f"training.grpo.rewards=[{{kind: regex}}, {{kind: model, model: '{folder}', weight: 10}}]"


def models_of(spec: Spec, longest: int = 9, digests: str | None = None) -> RewardModels:
    """The reward models of a spec on this machine."""
    return RewardModels(spec.training, VOCABULARY, longest, torch.device("cpu"), digests)


def test_the_reward_is_the_number_at_the_last_token(tmp_path: Path) -> None:
    decoder = write_reward_model(tmp_path)
    spec = prompt_spec(field_of(tmp_path))
    found = models_of(spec, digests=first_weights_digest(spec)).values(PROMPT, ANSWER)
    with torch.no_grad():
        numbers = decoder.eval()(torch.tensor([PROMPT + ANSWER]))
    assert isinstance(numbers, torch.Tensor)
    assert found == {1: float(numbers[0, -1])}
    assert len(set(numbers[0].tolist())) == 5, "each token has another number"


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_reward_model(tmp_path / "scores")
    spec = prompt_spec(field_of(tmp_path / "scores"))
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* has a context of 16, and .* may have 17 tokens"):
        models_of(spec, longest=17)
    digests = first_weights_digest(spec)
    write_reward_model(tmp_path / "scores", seed=6)
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* holds other weights"):
        models_of(spec, digests=digests)
    write_reward_model(tmp_path / "words", head="tokens")
    with pytest.raises(DataError, match=r"rewards\.1\.model: .* predicts tokens"):
        models_of(prompt_spec(field_of(tmp_path / "words")))
    with pytest.raises(SpecError, match=r"rewards\.0\.model: .*does not fit kind model"):
        prompt_spec("training.grpo.rewards=[{kind: model}]")


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
