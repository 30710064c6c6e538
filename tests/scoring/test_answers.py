"""pass@1, pass@k and the mean reward of an exported model's answers to held-out prompts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.corpus.encode import load_tokenizer
from holdfast.dataset import Dataset
from holdfast.model.decoder import Decoder
from holdfast.model.initialise import initialise
from holdfast.rollouts.generation import generate_lot, sampling_of
from holdfast.rollouts.turns import Texts
from holdfast.scoring.answers import SEED, score_answers
from holdfast.scoring.models import ExportedModel
from holdfast.store import open_store
from tests.rollouts.prompt_run import prompt_spec, write_prompts
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
