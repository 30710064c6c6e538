"""Messages to users name existing fields: advice that the spec refuses would be worse than none."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.spec import Spec
from holdfast.spec.schema import json_schema

SOURCE = Path(holdfast.__file__).parent
SECTIONS = "|".join(Spec.model_fields)
FIELD = re.compile(rf"(?<![\w./@-])((?:{SECTIONS})(?:\.[a-z0-9_]+)+)(?!\.?[\w/-])")
NO_FIELDS = {"model.embed_tokens.weight", "model.safetensors", "model.safetensors.index.json"}
NO_FIELDS |= {"serving.kserve.io", "serving.py"}
NO_FIELDS |= {"data.pkl"}  # a record in torch's files
NO_FIELDS |= {"training.yaml"}
NO_FIELDS |= {"evaluation.loss", "evaluation.step"}  # columns of the history


def named() -> Iterator[tuple[str, str]]:
    """Every dotted name below a section of the spec in the texts of the source, with its file."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in FIELD.findall(node.value):
                    yield name, str(path.relative_to(SOURCE))


@cache
def _schema() -> dict[str, Any]:
    return json_schema()


def is_field(name: str) -> bool:
    """Whether the schema has a value under a dotted name."""
    schema = _schema()
    at = [schema]
    for part in name.split("."):
        open_, at = at, []
        while open_:
            node = open_.pop()
            if "$ref" in node:
                open_.append(schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
            open_ += [schema for kind in ("anyOf", "allOf", "oneOf") for schema in node.get(kind, [])]
            if part in node.get("properties", {}):
                at.append(node["properties"][part])
            if part.isdigit() and "items" in node:
                at.append(node["items"])
    return bool(at)


def is_module(name: str) -> bool:
    """Whether a dotted name is a module below the package, or a name in one: docstrings refer to those."""
    path = SOURCE.joinpath(*name.split("."))
    return any(
        (place.with_suffix(".py")).exists() or (place / "__init__.py").exists()
        for place in (path, path.parent)
        if place != SOURCE / name.split(".", maxsplit=1)[0]
    )


@pytest.mark.slow
def test_every_field_that_is_named_is_in_the_schema() -> None:
    paths = {name: path for name, path in named() if name not in NO_FIELDS and not is_module(name)}
    assert len(paths) > 50
    assert {name: path for name, path in paths.items() if not is_field(name)} == {}


@pytest.mark.parametrize(
    ("name", "there"), [("training.optimizer.learning_rate", True), ("training.learning_rate", False)]
)
def test_is_field_recognizes_spec_fields(name: str, there: bool) -> None:
    assert is_field(name) == there
