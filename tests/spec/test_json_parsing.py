"""JSON from other writers becomes a typed value, or a DataError that names it. No other error is raised."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.spec.errors import DataError
from holdfast.spec.json_parsing import parse_json, parse_json_lines, parse_json_object, parse_json_value

DEEP = b"[" * 200_000
WRONG = [
    b"", b"{", DEEP, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", b'{"number": Infinity}', b'{"number": 1e999}',
    b"9" * 5000,
    b'"\\ud800"', b"{} x", b"null", b"3", b'"text"', b"[]", b'{"number": "1"}', b'{"number": [1]}', b'{"number": true}',
    b'{"number": null}', b'{"number": 1, "names": {"a": 1}}', b'{"number": 1, "names": [1]}',
]  # fmt: skip


class Model(BaseModel):
    number: float
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    number: float
    names: tuple[str, ...] = ()


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("model", [Model, Record])
def test_an_invalid_record_is_a_data_error_that_names_its_source(data: bytes, model: type) -> None:
    with pytest.raises(DataError, match=r"^runs/x/y\.json: is damaged \(.+\); delete it"):
        parse_json(data, model, "runs/x/y.json")


def test_a_parsed_record_has_the_types_of_its_fields() -> None:
    data = b'{"number": 2, "names": ["a"], "of a newer version": {}}'
    assert parse_json(data, Model, "x") == Model(number=2.0, names=("a",))
    assert parse_json(data, Record, "x") == Record(2.0, ("a",))
    assert parse_json(b"[[]]", list[list[str]], "x") == [[]]


@pytest.mark.parametrize("data", [b"[]", b"3", DEEP, b"{", b"{}{}"], ids=range(5))
def test_json_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="x: is damaged"):
        parse_json_object(data, "x")


def test_a_line_that_is_no_object_is_reported() -> None:
    assert parse_json_lines(b'{"a":1}\n\n{"b":2}', "x") == [{"a": 1}, {"b": 2}]
    with pytest.raises(DataError, match="x, line 3: is damaged"):
        parse_json_lines(b'{"a":1}\n\n{"b":', "x")


def test_random_bytes_and_changed_records_raise_nothing_else() -> None:
    seed = random.Random(0)
    whole = b'{"number": 1.5, "names": ["a", "b"], "more": {"x": [1, 2, {"y": null}]}}'
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(seed.randint(1, 4)):
            data[seed.randrange(len(data))] = seed.randrange(256)
        for parse in (lambda text: parse_json(text, Model, "x"), lambda text: parse_json_value(text, "x")):
            _returns_or_refuses(parse, bytes(data))


def _returns_or_refuses(parse: Any, data: bytes) -> None:
    try:
        parse(data)
    except DataError:
        return
