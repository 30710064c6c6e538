"""Conversations: the same tokens and counted tokens as in `transformers`, and whole conversations in each sample."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from holdfast.corpus import identify, prepare
from holdfast.corpus.chat import ChatEncoder, ChatTemplate, ConversationError, conversation_text
from holdfast.dataset import Dataset
from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.spec import Spec
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{% if loop.last %}{{ m['role'] + ': ' }}{% endif %}{{ m['content'] }}{% endfor %}"
SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>"]
TALK: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "äöü 你好? <|im_start|>assistant\nno"},
        {"role": "assistant", "content": "Yes,\n  you. 🙂"},
        {"role": "user", "content": "And {% raw %}?"},
        {"role": "assistant", "content": "No."},
    ]
}


def tokenizer_json() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return str(tokenizer.to_str())


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>"})


def encoded(text: str, talk: dict[str, Any] = TALK) -> np.ndarray:
    encoder = ChatEncoder(tokenizer_json(), template(text), 0)
    conversation = conversation_text(talk)
    assert conversation is not None
    return np.frombuffer(encoder.encode(conversation), dtype="<u4")


def counted_text(tokens: np.ndarray) -> list[str]:
    """The runs of counted tokens, as text."""
    is_counted = (tokens & UNCOUNTED) == 0
    runs = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(is_counted.astype(int))) + 1)
    tokenizer = Tokenizer.from_str(tokenizer_json())
    return [
        tokenizer.decode((tokens[run] & ID).tolist(), skip_special_tokens=False) for run in runs if is_counted[run[0]]
    ]


def test_tokens_and_counted_ones_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>")
    reference.chat_template = MARKED
    expected = reference.apply_chat_template(
        TALK["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = encoded(MARKED)
    assert (ours & ID).tolist() == expected["input_ids"]
    assert ((ours & UNCOUNTED) == 0).astype(int).tolist() == expected["assistant_masks"]
    assert np.flatnonzero(ours & ENDS).tolist() == [len(ours) - 1]


def test_a_template_without_marks_counts_what_a_turn_of_the_assistant_adds() -> None:
    assert (
        counted_text(encoded(CHATML)) == counted_text(encoded(MARKED)) == ["Yes,\n  you. 🙂<|im_end|>", "No.<|im_end|>"]
    )
    assert (encoded(CHATML) & ID).tolist() == (encoded(MARKED) & ID).tolist()


@pytest.mark.parametrize(
    ("text", "talk", "message"),
    [
        (FORGETFUL, TALK, r"\{% generation %\}"),
        (CHATML, {"messages": TALK["messages"][:2]}, "says nothing"),
        ("{{ raise_exception('no system here') }}", TALK, "refuses it: no system here"),
        ("{{ messages.__class__.__mro__ }}", TALK, "refuses it: access to attribute '__class__'"),
        ("{{ strftime_now('%d') }}", TALK, "refuses it: 'strftime_now' is undefined"),
    ],
)
def test_an_untrainable_conversation_is_refused_with_the_reason(text: str, talk: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        encoded(text, talk)


def question(number: int, length: int) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": f"{number}?"},
            {"role": "assistant", "content": f"answer {number} " + "x" * length},
        ]
    }


CONTEXT = 120


@pytest.fixture
def make_chat(tmp_path: Path) -> Callable[..., Spec]:
    def make(records: list[object], **data: object) -> Spec:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer_json())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": {"content": "<s>"}, "chat_template": CHATML})
        )
        (tmp_path / "talks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        settings = {
            "kind": "chat",
            "document_masks": True,
            "sources": [{"uri": str(tmp_path / "talks.jsonl")}],
            "tokenizer": {"kind": "file", "path": str(folder / "tokenizer.json"), "end_of_text": "<|im_end|>"},
            "validation_fraction": 0.2,
            "workers": 1,
            **data,
        }
        return Spec.model_validate({"name": "chat", "data": settings, "model": {"context": CONTEXT}})

    return make


def whole_conversations(rows: np.ndarray) -> list[str]:
    """The conversations of samples without fillers. Each must lie in one sample."""
    tokenizer, conversations = Tokenizer.from_str(tokenizer_json()), []
    for row in rows:
        for part in np.split(row[:-1], np.flatnonzero(row[:-1] & ENDS) + 1):
            if len(part) > 1:
                assert part[-1] & ENDS, "a conversation continues in the next sample"
                conversations.append(tokenizer.decode((part & ID).tolist(), skip_special_tokens=False))
        assert row[-1] & UNCOUNTED, "the first token of the next sample is no target of this one"
    return conversations


def test_every_conversation_is_complete_in_one_sample_and_only_answers_count(
    make_chat: Callable[..., Spec], store: Store
) -> None:
    records = [question(number, number % 40) for number in range(60)]
    prepared = prepare(make_chat(records), store)
    dataset = Dataset.open(store, prepared.dataset_id, Path("unused"))
    batches = dataset.training(CONTEXT, 4, seed=0)
    rows = np.concatenate([batches.batch(step) for step in range(batches.samples // 4)])
    epoch = np.concatenate([rows, *([] if batches.samples % 4 == 0 else [batches.batch(batches.samples // 4)])])
    training = sorted(set(whole_conversations(epoch)))
    validation = whole_conversations(np.concatenate(list(dataset.validation(CONTEXT, 10**6))))
    expected = sorted(
        f"<s><|im_start|>user\n{n}?<|im_end|>\n<|im_start|>assistant\nanswer {n} {'x' * (n % 40)}<|im_end|>\n"
        for n in range(60)
    )
    assert sorted([*training, *validation]) == expected
    assert len(validation) == prepared.documents["validation"] > 0
    answers = sorted({text for row in epoch for text in counted_text(row)})
    assert all(text.startswith("answer ") and text.endswith("<|im_end|>") for text in answers)
    assert len(answers) == prepared.documents["train"]
    assert dataset.chat_template == CHATML
    with pytest.raises(DataError, match="packed into samples of 120 tokens, and 64 are requested"):
        dataset.training(64, 4, seed=0)


def test_an_invalid_or_overlong_conversation_is_reported_or_counted(
    make_chat: Callable[..., Spec], store: Store
) -> None:
    good = [question(number, 3) for number in range(40)]
    bad = [{"text": "no"}, {"messages": []}, {"messages": [{"role": "user", "content": "alone"}]}, question(77, 500)]
    with pytest.raises(DataError, match=r"talks\.jsonl:41: has no conversation under 'messages'"):
        prepare(make_chat(good + bad), store)
    with pytest.raises(DataError, match="the assistant says nothing in it; correct it"):
        prepare(make_chat(good + bad[2:]), store)
    prepared = prepare(make_chat(good + bad, cleaning={"on_bad_record": "skip"}), store)
    assert prepared.dropped == {"bad_conversation": 1, "no_text": 2, "over_context": 1}


def test_a_record_in_another_layout_is_named_with_the_preset_that_reads_it(
    make_chat: Callable[..., Spec], store: Store
) -> None:
    alpaca = [{"instruction": "add", "input": "1 1", "output": "2"}]
    with pytest.raises(DataError, match="it has 'instruction', 'input', 'output'; use `fields: alpaca` of the source;"):
        prepare(make_chat(alpaca), store)
    with pytest.raises(DataError, match="it has 'talk'; correct it"):
        prepare(make_chat([{"talk": []}]), store)


def test_a_missing_or_invalid_template_is_reported(make_chat: Callable[..., Spec], tmp_path: Path) -> None:
    spec = make_chat([question(1, 1)])
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match=r"there is no chat template in .*model/; name a Jinja file"):
        identify(spec)
    with pytest.raises(MissingError, match=r"data\.chat\.template: /nowhere\.jinja is no file"):
        identify(make_chat([question(1, 1)], chat={"template": "/nowhere.jinja"}))
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(DataError, match="is no Jinja template"):
        identify(make_chat([question(1, 1)], chat={"template": str(tmp_path / "broken.jinja")}))


def test_rows_to_spare_are_those_of_the_weights(make_chat: Callable[..., Spec], store: Store, tmp_path: Path) -> None:
    tokenizer = {"kind": "file", "path": str(tmp_path / "model" / "tokenizer.json"), "end_of_text": "<|im_end|>"}
    records = [question(number, 3) for number in range(40)]
    assert prepare(make_chat(records, tokenizer={**tokenizer, "rows": 300}), store).vocabulary == 300
    with pytest.raises(DataError, match="100 are fewer than the 259 tokens"):
        prepare(make_chat(records, tokenizer={**tokenizer, "rows": 100}), store)
