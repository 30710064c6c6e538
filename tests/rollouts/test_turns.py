"""Answers with several turns: what the environment gets, which tokens count, and replays of recorded replies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.code.closure import role_digest, source_text
from holdfast.dataset.vocabulary import UNCOUNTED
from holdfast.rewards.process import RewardProcess
from holdfast.rollouts.advantages import rows_of
from holdfast.rollouts.generation import LENGTH, STOP, generate_lot, sample_tokens, uniforms
from holdfast.rollouts.records import Answer, Unit
from holdfast.rollouts.turns import RecordedReplies, turns_of
from holdfast.spec.rollout import Environment
from tests.rollouts.test_generation import END, PROMPTS, decoder_of, sampling

MINE = """\
def reply(record, turns, *, mark="!"):
    if turns[-1] == "raise":
        raise ValueError("no such tool")
    if turns[-1] == "number":
        return 3
    return None if record["stop"] else mark + turns[-1]
"""
PLACES, REPLY, MOST = [4, 5, 9], [21, 22], 24


class _Once:
    """Replies once to each answer."""

    def __init__(self) -> None:
        self.turns: dict[tuple[int, int], list[list[int]]] = {}

    def __call__(self, prompt: int, answer: int, turns: Any) -> list[int] | None:
        if len(turns) > 1:
            return None
        self.turns[prompt, answer] = turns
        return REPLY


def test_replies_take_the_place_of_sampled_tokens() -> None:
    """Each sampled token is the one of an ordinary forward pass over the turns before it."""
    decoder, once = decoder_of().double(), _Once()
    how = sampling(answers=6, most_tokens=MOST - 8)
    lot = generate_lot(decoder, PROMPTS, PLACES, how, once)
    assert once.turns
    for number, (prompt, place, answers) in enumerate(zip(PROMPTS, PLACES, lot, strict=True)):
        for each, answer in enumerate(answers):
            u = uniforms(how.seed, place, each, how.most_tokens)[: len(answer.tokens)]
            with torch.no_grad():
                logits: Any = decoder(torch.tensor([prompt + answer.tokens]))
            tokens, entropy = sample_tokens(logits[0, len(prompt) - 1 : -1], torch.tensor(u).double(), how.temperature)
            given = {at for begin, end in answer.replies for at in range(begin, end)}
            free = [at for at in range(len(answer.tokens)) if at not in given]
            assert [tokens[at] for at in free] == [answer.tokens[at] for at in free]
            assert answer.entropy == pytest.approx(float(entropy[free].mean()), rel=1e-9)
            if not answer.replies:
                continue
            (begin, end), turns = answer.replies[0], turns_of(answer.tokens, answer.replies)
            assert turns[:2] == [once.turns[number, each][0], REPLY]
            assert answer.tokens[begin - 1] == END
            assert (begin, end) == (len(turns[0]), len(turns[0]) + 2)


def test_recorded_replies_give_the_same_answers() -> None:
    decoder, how = decoder_of(), sampling(answers=6, most_tokens=16)
    lot = generate_lot(decoder, PROMPTS, PLACES, how, _Once())
    units = [
        Unit(
            prompt=number,
            place=number,
            answers=[
                Answer(
                    tokens=answer.tokens, ending="stop", entropy=answer.entropy, rewards=[], errors=[], reward=0.0,
                    replies=answer.replies,
                )
                for answer in answers
            ],
        )
        for number, answers in enumerate(lot)
    ]  # fmt: skip
    again = generate_lot(decoder, PROMPTS, PLACES, how, RecordedReplies(units))
    assert [[answer.tokens for answer in answers] for answers in again] == [unit.tokens for unit in units]
    assert any(answer.replies for answers in lot for answer in answers)
    words, advantages = rows_of(units, PROMPTS, True, context=24, filler=0)
    row = 0
    for unit, prompt in zip(units, PROMPTS, strict=True):
        for answer in unit.answers:
            counted = (words[row] & UNCOUNTED == 0).nonzero()[:, 0].tolist()
            given = {len(prompt) + at for begin, end in answer.replies for at in range(begin, end)}
            places = range(len(prompt), len(prompt) + len(answer.tokens))
            assert counted == [at for at in places if at not in given], "no gradient reads a reply"
            assert not advantages[row, sorted(given)].any()
            row += 1


def test_a_reply_without_room_ends_an_answer_at_its_limit() -> None:
    how = sampling(answers=8, most_tokens=8)
    lot = generate_lot(decoder_of(), PROMPTS * 2, range(6), how, lambda *_: [21] * 8)
    ended = [answer for answers in lot for answer in answers if answer.tokens[-1] == END]
    assert ended
    assert all(answer.ending == LENGTH and not answer.replies for answer in ended)
    stopped = [
        answer.ending for answers in generate_lot(decoder_of(), PROMPTS * 2, range(6), how) for answer in answers
    ]
    assert stopped.count(STOP) == len(ended)


def test_an_environment_replies_in_the_child_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    texts = {"mine.py": source_text(MINE.encode())}
    given = {"use": "mine.py:reply", "mark": "?", "digest": role_digest(texts, "mine.py:reply"), "timeout_seconds": 60}
    with RewardProcess([], str(tmp_path), Environment.model_validate(given)) as process:
        assert process.reply({"stop": False}, ["a"]) == ("?a", "")
        assert process.reply({"stop": True}, ["a"]) == (None, "")
        none, error = process.reply({"stop": False}, ["raise"])
        assert none is None
        assert "no such tool" in error
        assert "no text" in process.reply({"stop": False}, ["number"])[1]
