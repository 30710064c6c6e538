"""Preferences become pairs of documents, labeled answers one each: a prompt and its answer, and only answers count."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from holdfast.components.preprocess import run
from holdfast.corpus.chat import ChatEncoder, ChatTemplate, ConversationError, labeled_text, pair_text
from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED, UNDESIRABLE
from holdfast.spec import parse_spec
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.corpus.test_chat import CHATML, SPECIALS, counted_text, tokenizer_json

USER, GOOD = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5 "}
END = 256 + SPECIALS.index("<|im_end|>")


def encoded(record: Any, template: str = CHATML) -> list[np.ndarray]:
    """The documents of a record."""
    text = pair_text(record)
    assert text is not None
    tokens = np.frombuffer(ChatEncoder(tokenizer_json(), ChatTemplate(template, {}), END).encode(text), "<u4")
    return np.split(tokens, np.flatnonzero(tokens & ENDS)[:-1] + 1)


def decoded(tokens: np.ndarray) -> str:
    return str(Tokenizer.from_str(tokenizer_json()).decode((tokens & ID).tolist(), skip_special_tokens=False))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},  # the format of UltraFeedback
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_pairs_encode_chosen_before_rejected_and_only_the_answers_count(record: dict[str, object]) -> None:
    chosen, rejected = encoded(record)
    assert decoded(chosen) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert counted_text(chosen) == ["4<|im_end|>"]
    assert counted_text(rejected) == ["5 <|im_end|>"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "What is 2+2?", "chosen": " 4", "rejected": " five"},
        {"chosen": "What is 2+2? 4", "rejected": "What is 2+2? five"},
    ],
)
def test_texts_are_ended_by_the_token_for_that(record: dict[str, object]) -> None:
    chosen, rejected = encoded(record, template="")
    assert decoded(chosen) == "What is 2+2? 4<|im_end|>"
    assert counted_text(chosen) == [" 4<|im_end|>"]
    assert counted_text(rejected) == [" five<|im_end|>"]
    with pytest.raises(ConversationError, match="no chat template"):
        encoded({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, template="")


def test_a_prompt_of_several_turns_is_all_that_both_answers_begin_with() -> None:
    talk = [{"role": "system", "content": "Add."}, USER, {**GOOD, "content": "3"}, {"role": "user", "content": "No."}]
    pair = json.loads(pair_text({"prompt": "2+2?", "chosen": [*talk, GOOD], "rejected": [*talk, BAD, USER]}) or "")
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (talk, [GOOD], [BAD, USER])
    record_with_prompt = {
        "prompt": [USER],
        "chosen": [USER],
        "rejected": [USER, BAD],
    }  # a separate answer, not a repetition
    assert json.loads(pair_text(record_with_prompt) or "")["chosen"] == [USER]


@pytest.mark.parametrize(
    "record",
    [
        [],
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "", "rejected": "c"},
        {"prompt": [USER], "chosen": "b", "rejected": "c"},
        {"chosen": "b", "rejected": "c"},  # they share no beginning
        {"prompt": "a", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "2+2?", "chosen": [USER, GOOD], "rejected": [USER, GOOD]},  # they are equal
        {"prompt": [USER], "chosen": [{"content": "4"}], "rejected": [BAD]},
    ],
)
def test_an_invalid_pair_is_no_record(record: Any) -> None:
    assert pair_text(record) is None


def test_a_dataset_packs_pairs_whole_and_holds_out_what_was_chosen(tmp_path: Path, store: Store) -> None:
    lines = [
        {"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": str(number + 2)} for number in range(300)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    spec = parse_spec(
        f"name: p\ndata: {{kind: preferences, document_masks: true, sources: [{{uri: {tmp_path}/pairs.jsonl}}]}}\n",
        [f"data.tokenizer.path={tmp_path}/tokenizer.json", "data.tokenizer.kind=file", "data.validation_fraction=0.2",
         "data.tokenizer.end_of_text=<|im_end|>", "model.context=32", "model.init_from=w"],
    )  # fmt: skip
    dataset = Dataset.open(store, run(spec, store).dataset_id, tmp_path / "cache")
    assert dataset.kind == "preferences"
    assert dataset.chat_template is None
    training = set()
    for step in range(20):
        for row in dataset.training(32, 8, seed=1).batch(step):
            documents = np.split(row[:-1], np.flatnonzero(row[:-1] & ENDS) + 1)
            answers = [counted_text(document)[0] for document in documents if (document & UNCOUNTED == 0).any()]
            for chosen, rejected in zip(answers[::2], answers[1::2], strict=True):
                assert int(chosen.removesuffix("<|im_end|>")) + 1 == int(rejected.removesuffix("<|im_end|>"))
                training.add(chosen)
    assert len(training) > 150
    validation = [text for rows in dataset.validation(32, 10**6) for row in rows for text in counted_text(row)]
    assert validation and not training & set(validation)
    bad = tmp_path / "pairs.jsonl"
    bad.write_text(json.dumps({"prompt": "a", "chosen": "b"}))
    with pytest.raises(DataError, match="has no pair under 'prompt'"):
        run(spec, store)


def test_a_dataset_of_labeled_answers_marks_undesirable_ones_and_holds_out_desirable_ones(
    tmp_path: Path, store: Store
) -> None:
    lines = [
        {"prompt": f"{number}+1=", "completion": str(number + 1 + number % 2), "label": number % 2 == 0}
        for number in range(120)
    ]
    source = tmp_path / "answers.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    spec = parse_spec(
        f"name: p\ndata: {{kind: unpaired, document_masks: true, sources: [{{uri: {source}}}]}}\n",
        [f"data.tokenizer.path={tmp_path}/tokenizer.json", "data.tokenizer.kind=file", "data.validation_fraction=0.2",
         "data.tokenizer.end_of_text=<|im_end|>", "model.context=32", "model.init_from=w"],
    )  # fmt: skip
    dataset = Dataset.open(store, run(spec, store).dataset_id, tmp_path / "cache")
    assert dataset.kind == "unpaired"
    labels = set()
    for row in dataset.training(32, 8, seed=1).batch(0):
        for document in np.split(row[:-1], np.flatnonzero(row[:-1] & ENDS) + 1):
            if (document & UNCOUNTED == 0).any():
                prompt, answer = decoded(document).removesuffix("<|im_end|>").split("=")
                labels.add(is_wrong := int(prompt.removesuffix("+1")) % 2 == 1)
                assert counted_text(document & ~UNDESIRABLE) == [f"{answer}<|im_end|>"]
                assert ((document & UNDESIRABLE != 0) == is_wrong).all()
    assert labels == {True, False}
    held_out = [row for rows in dataset.validation(32, 10**6) for row in rows]
    assert any((row & UNDESIRABLE != 0).any() for row in held_out)
    assert not any(((row & UNDESIRABLE != 0) & (row & UNCOUNTED == 0)).any() for row in held_out)
    source.write_text(json.dumps({"prompt": "a", "completion": "b", "label": "good"}))
    with pytest.raises(DataError, match=r"answers\.jsonl:1: its 'label' is \"good\"; write true or false"):
        run(spec, store)


@pytest.mark.parametrize(
    "record", [{"prompt": "a", "label": True}, {"prompt": [USER], "completion": "b", "label": True}, {"label": True}]
)
def test_an_invalid_labeled_answer_is_no_record(record: Any) -> None:
    assert labeled_text(record) is None
