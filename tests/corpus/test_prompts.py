"""Prompts: from jsonl to a dataset, and back to tokens and records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.components.preprocess.__main__ import body
from holdfast.corpus.chat import ConversationError, prompt_text
from holdfast.corpus.overview import overview
from holdfast.corpus.prepare import Prepared
from holdfast.dataset import Dataset
from holdfast.dataset.prompts import prompt_numbers
from holdfast.spec import parse_spec
from holdfast.store import open_store
from tests.train.tiny_run import _tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SPEC = """
name: p
data:
  kind: prompts
  document_masks: true
  sources: [{uri: %s/*.jsonl}]
  tokenizer: {kind: file, path: %s/tokenizer.json}
  chat: {template: %s/t.jinja}
  validation_fraction: 0.2
  workers: 1
model: {layers: 1, hidden: 32, heads: 2, context: 64}
training: {global_batch: 8, micro_batch: 4, grpo: {rewards: [exact], answer_tokens: 8}}
"""


def test_prompts_come_back_with_their_tokens_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": f"{number}+1=", "answer": str(number + 1), "level": {"x": [number]}} for number in range(40)
    ]
    records.append({"messages": [{"role": "user", "content": "häh?"}], "tests": "assert 1"})
    lines = [json.dumps(record) for record in [*records, records[0]]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "tokenizer.json").write_bytes(_tokenizer())
    (tmp_path / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    store = open_store(f"file://{tmp_path / 'store'}")
    spec = parse_spec(SPEC % (tmp_path, tmp_path, tmp_path))
    prepared = Prepared.model_validate(body(spec, store.url).result)
    assert prepared.dropped == {"duplicate": 1}
    dataset = Dataset.open(store, prepared.dataset_id, tmp_path / "cache")
    from tokenizers import Tokenizer

    tokenizer, found = Tokenizer.from_str(dataset.tokenizer_json()), []
    for split in ("train", "validation"):
        prompts = dataset.prompts(split)
        found += [prompts[number] for number in range(len(prompts))]
        sizes = [len(prompts[number].tokens) for number in range(len(prompts))]
        length, number = prompts.longest()
        assert length == max(sizes) == sizes[number]
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    shown = overview(spec, store, samples=3)
    assert [sample.segments[0].text for sample in shown.samples] == [
        tokenizer.decode(dataset.prompts()[number].tokens)
        for number in prompt_numbers(len(dataset.prompts()), spec.training.seed, 0, 3).tolist()
    ]
    assert shown.epochs == pytest.approx(spec.training.steps / len(dataset.prompts())), "one group of eight a step"
    texts = {json.dumps(prompt.record, sort_keys=True): tokenizer.decode(prompt.tokens) for prompt in found}
    assert len(texts) == 41
    for record in records[:-1]:
        assert texts[json.dumps(record, sort_keys=True)] == record["prompt"]
    asked = {"prompt": records[-1]["messages"], "tests": "assert 1"}
    assert texts[json.dumps(asked, sort_keys=True)] == "<user>häh?<a>"
    rows = list(dataset.validation(64, 10_000))
    assert len(rows) == prepared.documents["validation"]
    assert all((row >= 0).all() and (row < dataset.vocabulary).all() for row in rows)


def test_an_epoch_has_every_prompt_once() -> None:
    first = prompt_numbers(10, 3, 0, 10)
    assert sorted(first.tolist()) == list(range(10))
    second = prompt_numbers(10, 3, 10, 10)
    assert first.tolist() != second.tolist()
    assert np.array_equal(prompt_numbers(10, 3, 7, 6), np.concatenate((first[7:], second[:3])))


@pytest.mark.parametrize("record", [{"prompt": ""}, {"question": "x"}, ["x"], {"messages": []}])
def test_a_record_without_a_prompt_is_none(record: object) -> None:
    assert prompt_text(record) is None


def test_tools_that_are_no_json_are_refused() -> None:
    with pytest.raises(ConversationError, match="tools"):
        prompt_text({"prompt": "x", "tools": "no"})
