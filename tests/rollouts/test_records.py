"""Records of answers, advantages, and the rows that a step learns from."""

from pathlib import Path

import pytest
import torch

from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.objectives.interface import micro_batches
from holdfast.rollouts.advantages import advantages_of, has_signal, rows_of, scored_rows
from holdfast.rollouts.records import Answer, LotRecord, Unit, find_record, logprobs_key, record_key
from holdfast.spec.errors import DataError, SpecError
from holdfast.store import open_store
from tests.rollouts.prompt_run import prompt_spec


def answer(tokens: list[int], reward: float) -> Answer:
    return Answer(tokens=tokens, ending="stop", entropy=0.25, rewards=[reward], errors=[""], reward=reward)


UNITS = [
    Unit(prompt=4, place=0, answers=[answer([7, 0], 1.0), answer([8, 9, 0], 0.0)]),
    Unit(prompt=2, place=1, answers=[answer([5, 0], 0.5), answer([6, 6], 0.5)]),
]


def test_a_record_is_created_once_and_read_back(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    record = LotRecord(step=3, lot=1, policy="a" * 32, units=UNITS)
    key = record_key("run", 3, 1, record.policy, {"threads": 1})
    assert find_record(store, key) is None
    assert store.put_if_absent(key, record.dump())
    assert find_record(store, key) == record
    assert not store.put_if_absent(key, record.model_copy(update={"lot": 2}).dump())
    others = [record_key("run", 3, 1, "b" * 32, {"threads": 1}), record_key("run", 3, 1, record.policy, {"threads": 2})]
    assert len({key, *others}) == 3
    store.put(key, record.dump()[:-20])
    with pytest.raises(DataError, match=r"is damaged .*delete it"):
        find_record(store, key)
    store.put(key, record.dump().replace(b'"prompt":4', b'"prompt":5'))
    with pytest.raises(DataError, match=r"has not the content of its digest .*delete it"):
        find_record(store, key)


def test_log_probabilities_belong_to_their_answers() -> None:
    """Another plan may give other answers with the same weights."""
    words = torch.arange(8).view(2, 4)
    keys = {logprobs_key("run", 3, policy, rows) for policy in ("a" * 32, "b" * 32) for rows in (words, words + 1)}
    assert len(keys) == 4
    assert logprobs_key("run", 3, "a" * 32, words.clone()) in keys


def test_the_rows_of_answers_have_their_advantages_on_counted_tokens() -> None:
    words, advantages = rows_of(UNITS, [[1, 2], [3]], True, context=40, filler=0)
    assert words.shape == (4, 17)
    first, second = advantages_of([1.0, 0.0], scaled=True).tolist()
    assert first == pytest.approx(0.5 / (0.5**0.5 + 1e-4))
    assert (words[1] & ID)[:6].tolist() == [1, 2, 8, 9, 0, 0]
    assert (words[1] & UNCOUNTED == 0).nonzero()[:, 0].tolist() == [2, 3, 4]
    assert (words[1] & ENDS != 0).nonzero()[:, 0].tolist() == [*range(4, 17)]
    assert advantages[1].tolist() == pytest.approx([0, 0, second, second, second, *[0] * 12])
    assert not advantages[2:].any(), "answers with one reward say nothing"
    assert [has_signal(unit) for unit in UNITS] == [True, False]
    logprobs = torch.arange(68.0).view(4, 17)
    (batch,) = micro_batches(scored_rows(words, advantages, logprobs), 4, -1, torch.device("cpu"))
    assert batch.scores is not None
    assert torch.equal(batch.scores[..., 0], advantages[:, 1:])
    assert torch.equal(batch.scores[..., 1], logprobs[:, 1:])
    assert torch.equal(batch.marks, words[:, 1:])


def test_a_row_is_never_longer_than_the_context() -> None:
    assert rows_of(UNITS, [[1, 2], [3]], True, context=5, filler=0)[0].shape == (4, 6)


def test_older_weights_need_one_update() -> None:
    with pytest.raises(SpecError, match=r"training\.grpo\.lag: .*not supported with several updates"):
        prompt_spec("training.grpo.lag=1", "training.grpo.updates=2")


def test_a_lot_whose_record_could_not_be_read_again_is_refused() -> None:
    long = ("model.context=65537", "training.grpo.answer_tokens=65536")
    with pytest.raises(SpecError, match=r"training\.grpo\.lot: may give a record of 134,"):
        prompt_spec(*long, "training.grpo.lot=64", "training.global_batch=256")
    prompt_spec(*long, "training.grpo.lot=8", "training.global_batch=256")
