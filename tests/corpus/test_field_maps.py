"""Field maps: records of other layouts become the conversations, pairs and answers that they mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.corpus import identify
from holdfast.corpus.field_maps import dump_map
from holdfast.corpus.record_types import Flaw, Kind, Reading, document_of
from holdfast.spec.data import FieldMap
from holdfast.spec.errors import SpecError
from holdfast.spec.load import load_spec
from tests.corpus.conftest import MakeSpec


def mapped(fields: object, record: dict[str, Any], kind: Kind = "chat") -> Any:
    reading = Reading(10**6, kind=kind, fields=dump_map(FieldMap.model_validate(fields)))
    document = document_of(record, reading)
    return document if isinstance(document, Flaw) else json.loads(str(document))


QUESTION = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("fields", "record", "messages"),
    [
        ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}, [QUESTION, ANSWER]),
        (
            "alpaca",
            {"instruction": "Add.", "input": "2 2", "output": "4", "system": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add.\n2 2"}, ANSWER],
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            [QUESTION, ANSWER],
        ),
        ("prompt_completion", {"prompt": "2+2?", "completion": "4"}, [QUESTION, ANSWER]),
        ("prompt_completion", {"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION, ANSWER]),
        ({"prompt": "q", "completion": "a"}, {"q": "2+2?", "a": "4", "prompt": "no"}, [QUESTION, ANSWER]),
        ({"preset": "alpaca", "completion": "response"}, {"instruction": "2+2?", "response": "4"}, [QUESTION, ANSWER]),
        (
            {"messages": "talk", "role": "who", "content": "says", "roles": {"bot": "assistant"}},
            {"talk": [{"who": "user", "says": "2+2?"}, {"who": "bot", "says": "4", "mood": None}]},
            [QUESTION, ANSWER],
        ),
        ({"messages": "talk"}, {"talk": json.dumps([QUESTION, ANSWER])}, [QUESTION, ANSWER]),
    ],
)
def test_a_conversation_is_found_under_the_keys_of_its_map(fields: object, record: Any, messages: list[Any]) -> None:
    assert mapped(fields, record) == {"messages": messages}


def test_pairs_and_labeled_answers_are_found_under_their_keys() -> None:
    pair = mapped(
        {"prompt": "q", "chosen": "good", "rejected": "bad"}, {"q": "x", "good": "y", "bad": "z"}, "preferences"
    )
    assert pair == {"prompt": "x", "chosen": "y", "rejected": "z"}
    answer = mapped({"completion": "a", "label": "ok"}, {"prompt": "x", "a": "y", "ok": "False"}, "unpaired")
    assert answer == {"prompt": "x", "completion": "y", "label": False}


@pytest.mark.parametrize(
    ("record", "reason"),
    [({"instruction": "a"}, "no_text"), ({"instruction": "a", "output": ""}, "no_text"), ([], "no_text")],
)
def test_a_record_without_the_keys_is_named_with_the_map(record: Any, reason: str) -> None:
    flaw = mapped("alpaca", record)
    assert isinstance(flaw, Flaw)
    assert flaw.reason == reason
    assert "completion: output" in flaw.detail


def test_a_map_is_in_the_id_and_a_preset_counts_as_its_keys(make_spec: MakeSpec, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')

    def of(fields: object) -> str:
        spec = make_spec({"uri": str(path)} | ({"fields": fields} if fields else {}))
        return identify(spec)

    alpaca = {"prompt": "instruction", "input": "input", "completion": "output", "system": "system"}
    assert of("alpaca") == of(alpaca) == of({"preset": "alpaca"})
    assert len({of(None), of("alpaca"), of("sharegpt")}) == 3


def test_a_map_of_plain_text_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("name: a\ndata:\n  sources: [{uri: a.jsonl, fields: alpaca}]\n")
    with pytest.raises(SpecError, match="name the key of the text in text_field"):
        load_spec(spec)
