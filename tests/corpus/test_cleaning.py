"""Cleaning changes the texts of conversations and pairs, and never the JSON around them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.preprocess import run
from holdfast.corpus import identify
from holdfast.corpus.chat import conversation_text, pair_text
from holdfast.corpus.cleaning import clean
from holdfast.corpus.record_types import Flaw
from holdfast.spec import Spec
from holdfast.spec.data import Cleaning
from holdfast.store import Store
from tests.corpus.conftest import MakeSpec
from tests.corpus.test_chat import make_chat, question

__all__ = ["make_chat"]

DECOMPOSED, COMPOSED = "e\u0301", "\u00e9"
BREAKING = "line one\n\u0303 two"  # in JSON, the combining character follows the `n` of an escape
# NFKC turns these into ASCII quotation marks and a backslash.
QUOTED = "please \uff02,\uff02role\uff02:\uff02system \uff3c"
CALL = {"type": "function", "function": {"name": DECOMPOSED, "arguments": '{"a": "x\\n\u0303"}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": DECOMPOSED}}]


def cleaned(record: dict[str, Any], kind: str = "chat", **rules: Any) -> Any:
    text = (conversation_text if kind == "chat" else pair_text)(record)
    assert text is not None
    result = clean(text, Cleaning(**rules), kind)  # type: ignore[arg-type]
    return result if isinstance(result, Flaw) else json.loads(result)


def talk(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a", **more}]}


@pytest.mark.parametrize(
    ("content", "form", "expected"),
    [
        (DECOMPOSED, "NFC", COMPOSED),
        (DECOMPOSED, "none", DECOMPOSED),
        (BREAKING, "NFC", BREAKING),
        (BREAKING, "NFKC", BREAKING),
        (QUOTED, "NFKC", 'please ","role":"system \\'),
        ([{"text": DECOMPOSED}, {"type": "image"}], "NFC", [{"text": COMPOSED}, {"type": "image"}]),
    ],
)
def test_the_texts_of_messages_are_normalised(content: Any, form: str, expected: Any) -> None:
    assert cleaned(talk(content), unicode=form) == talk(expected)
    pair = {"prompt": talk(content)["messages"][:1], "chosen": [{"role": "assistant", "content": content}]}
    pair["rejected"] = [{"role": "assistant", "content": "no"}]
    record = cleaned(pair, "preferences", unicode=form)
    assert (record["prompt"][0]["content"], record["chosen"][0]["content"]) == (expected, expected)
    if isinstance(content, str):
        plain = cleaned({"prompt": content, "chosen": content, "rejected": "no"}, "preferences", unicode=form)
        assert plain == {"prompt": expected, "chosen": expected, "rejected": "no"}


def test_tools_their_calls_and_their_answers_stay_as_they_are() -> None:
    answer = {"role": "tool", "content": '{"x": "\\n\u0303"}'}
    record = {**talk("é", tool_calls=[CALL], reasoning_content=DECOMPOSED), "tools": TOOLS}
    record["messages"].append(answer)
    result = cleaned(record, unicode="NFKC")
    assert (result["tools"], result["messages"][1]["tool_calls"], result["messages"][2]) == (TOOLS, [CALL], answer)
    assert result["messages"][1]["reasoning_content"] == COMPOSED


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"min_characters": 6}, "too_short"),
        ({"min_characters": 5, "max_characters": 5}, None),
        ({"max_characters": 4}, "too_long"),
    ],
)
def test_the_characters_are_those_that_people_wrote(rules: dict[str, Any], reason: str | None) -> None:
    record = {
        **talk(f"{DECOMPOSED}bcd", tool_calls=[CALL]),
        "tools": TOOLS,
    }  # 4 composed characters, and 1 in the answer
    pair = {"prompt": f"{DECOMPOSED}b", "chosen": "cd", "rejected": "e"}
    for result in (cleaned(record, **rules), cleaned(pair, "preferences", **rules)):
        assert (result.reason if isinstance(result, Flaw) else None) == reason


def test_repetition_is_that_of_the_lines_of_the_texts() -> None:
    flaw = cleaned(talk("same\nsame\nsame\nsame"), max_repetition=0.5)
    assert (flaw.reason, flaw.detail) == (
        "repetitive",
        "repeats 60% of its lines, more than data.cleaning.max_repetition = 0.5",
    )


def test_a_bad_conversation_is_named_by_its_line(
    make_chat: Callable[..., Spec], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    records = [question(number, 3) for number in range(20)]
    records[7:7] = [{"messages": [{"role": "user", "content": "no answer comes"}]}]
    prepared = run(make_chat(records, cleaning={"on_bad_record": "skip"}), store)
    assert prepared.dropped == {"bad_conversation": 1}
    example = prepared.examples["bad_conversation"]
    assert example.place.endswith("talks.jsonl:8")
    assert (example.detail, example.excerpt) == ("the assistant says nothing in it", "no answer comes")
    assert "talks.jsonl:8: the assistant says nothing in it" in caplog.text


def test_conversations_have_other_ids_than_when_their_json_was_normalised_and_texts_have_not(
    make_chat: Callable[..., Spec], make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.corpus import identity

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    specs = (make_spec(tmp_path / "a.jsonl"), make_chat([question(1, 3)]))
    now = [identify(spec) for spec in specs]
    assert now[0] == "9c3cee6b0eb1d6af"  # the result of earlier versions
    monkeypatch.setattr(identity, "CONVERSATION_VERSION", 1)
    assert [identify(spec) == before for spec, before in zip(specs, now, strict=True)] == [True, False]
