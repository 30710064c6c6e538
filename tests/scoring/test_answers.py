"""pass@1, pass@k and the mean reward of an exported model's answers to held-out prompts."""

import re
from pathlib import Path

import pytest
import torch

from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.model.decoder import Decoder
from holdfast.model.hub import first_weights_digest
from holdfast.model.initialise import initialise
from holdfast.rollouts.generation import generate_lot, sampling_of
from holdfast.rollouts.turns import Texts
from holdfast.scoring.answers import SEED, score_answers
from holdfast.scoring.models import ExportedModel
from holdfast.spec.errors import DataError
from holdfast.store import open_store
from tests.rollouts.prompt_run import prompt_spec, write_prompts
from tests.rollouts.test_reward_models import write_reward_model
from tests.train.tiny_run import VOCABULARY

ANSWERS, PROMPTS, SOLVED, PATTERN = 4, 9, 2.0, "[a-m]"


def test_the_shares_of_solved_prompts_are_those_of_the_sampled_answers(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    dataset = Dataset.open(store, write_prompts(store), tmp_path)
    spec = prompt_spec(
        "training.grpo.rewards=[{kind: regex, weight: 2, timeout_seconds: 60}]", f"evaluation.answers={ANSWERS}",
        f"evaluation.max_prompts={PROMPTS}", f"evaluation.solved_reward={SOLVED}", "training.grpo.answer_tokens=6",
    )  # fmt: skip
    decoder = Decoder.empty(spec.model, VOCABULARY)
    initialise(decoder, seed=1)
    text = dataset.tokenizer_json()
    tokenizer = load_tokenizer(text)
    found = score_answers(spec, ExportedModel(decoder.eval(), tokenizer, text), dataset, "")
    prompts = dataset.prompts("validation")
    texts, sampling = (
        Texts(tokenizer, dataset.end_of_text),
        sampling_of(spec.training.grpo, ANSWERS, SEED, dataset.end_of_text),
    )
    solved: list[list[bool]] = []
    for first in range(0, PROMPTS, spec.training.grpo.lot):
        lot = [prompts[number] for number in range(first, min(first + spec.training.grpo.lot, PROMPTS))]
        places = [prompt.number for prompt in lot]
        for answers in generate_lot(decoder, [prompt.tokens for prompt in lot], places, sampling):
            solved.append([re.search(PATTERN, texts.of(answer.tokens)) is not None for answer in answers])
    right = sum(map(sum, solved))
    assert 0 < right < PROMPTS * ANSWERS
    assert found["pass_at_1"] == pytest.approx(right / (PROMPTS * ANSWERS))
    assert found["pass_at_k"] == pytest.approx(sum(map(any, solved)) / PROMPTS)
    assert found["mean_reward"] == pytest.approx(2 * right / (PROMPTS * ANSWERS))
    assert found["pass_at_k"] > found["pass_at_1"]


def test_a_reward_model_scores_answers_with_the_weights_of_the_run_id(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path / 'store'}")
    dataset = Dataset.open(store, write_prompts(store), tmp_path)
    scores = write_reward_model(tmp_path / "scores").eval()
    spec = prompt_spec(
        f"training.grpo.rewards=[{{kind: model, model: '{tmp_path / 'scores'}', weight: 3}}]",
        f"evaluation.answers={ANSWERS}", f"evaluation.max_prompts={PROMPTS}", "evaluation.solved_reward=0",
    )  # fmt: skip
    decoder = Decoder.empty(spec.model, VOCABULARY)
    initialise(decoder, seed=1)
    text = dataset.tokenizer_json()
    exported, weights = ExportedModel(decoder.eval(), load_tokenizer(text), text), first_weights_digest(spec)
    found = score_answers(spec, exported, dataset, "", weights)
    prompts, sampling = (
        dataset.prompts("validation"),
        sampling_of(spec.training.grpo, ANSWERS, SEED, dataset.end_of_text),
    )
    rewards: list[list[float]] = []
    for first in range(0, PROMPTS, spec.training.grpo.lot):
        lot = [prompts[number] for number in range(first, min(first + spec.training.grpo.lot, PROMPTS))]
        tokens = [prompt.tokens for prompt in lot]
        for prompt, answers in zip(
            lot, generate_lot(decoder, tokens, [each.number for each in lot], sampling), strict=True
        ):
            rewards.append([])
            for answer in answers:
                with torch.no_grad():
                    numbers = scores(torch.tensor([[*prompt.tokens, *answer.tokens]]))
                rewards[-1].append(3 * float(numbers[0, -1]))
    solved = sum(value >= 0 for values in rewards for value in values)
    assert 0 < solved < PROMPTS * ANSWERS
    assert found["mean_reward"] == sum(map(sum, rewards)) / (PROMPTS * ANSWERS)
    assert found["pass_at_1"] == solved / (PROMPTS * ANSWERS)
    write_reward_model(tmp_path / "scores", seed=6)
    with pytest.raises(DataError, match=r"training\.grpo\.rewards\.0\.model: .* holds other weights"):
        score_answers(spec, exported, dataset, "", weights)
