"""The JSON Schema and the reference agree with the models."""

import json
from pathlib import Path

import jsonschema
import pytest

from holdfast.spec import SpecError, parse_spec, strict_yaml
from holdfast.spec.fields import leaves
from holdfast.spec.schema import MODELINE, SCHEMA_URL, json_schema, markdown, schema_text
from tests.spec.conftest import text_with

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


SPECS = sorted(path for path in ROOT.glob("examples/**/*.yaml") if path.parent.name != "clusters")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem if path.stem != "spec" else path.parent.name)
def test_every_example_fits_the_schema_that_its_modeline_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (modeline,) = (line for line in text.splitlines() if line.startswith(MODELINE))
    schema = json.loads((path.parent / modeline.removeprefix(MODELINE)).read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    spec = strict_yaml.read(text)
    validator.validate(spec)
    (error,) = validator.iter_errors({**spec, "trainign": {}})
    assert "trainign" in error.message


def test_the_schema_file_is_up_to_date_and_names_where_it_is_published() -> None:
    """If this fails: python -m holdfast.spec.schema --json > docs/spec.schema.json"""
    text = (ROOT / "docs" / "spec.schema.json").read_text(encoding="utf-8")
    assert text == schema_text()
    assert json.loads(text)["$id"] == SCHEMA_URL


@pytest.mark.parametrize(
    "changes",
    [{"training.steps": 0}, {"training.stepz": 1}, {"training.precision": "bf61"}, {"name": "Große"}, {"modle": {}},
     {"data.sources": []}, {"data.sources.0": {}}, {"training.compile": 3}],
    ids=str,
)  # fmt: skip
def test_the_schema_refuses_values_that_the_models_refuse(
    validator: jsonschema.Draft202012Validator, changes: dict[str, object]
) -> None:
    text = text_with(**changes)
    with pytest.raises(SpecError):
        parse_spec(text)
    assert not validator.is_valid(strict_yaml.read(text))


def test_the_json_schema_describes_every_field_and_refuses_unknown_ones() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["title"] == "Holdfast spec"
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is ("use" in section["properties"])  # arguments of a function
        for field in section["properties"].values():
            target = schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else {}
            assert (field.get("description") or target["description"]).endswith(".")
            assert "title" not in field


def test_the_reference_is_up_to_date() -> None:
    """If this fails: python -m holdfast.spec.schema > docs/spec.md"""
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == markdown()


def test_the_reference_has_every_field_once() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(["from", *(leaf.name for leaf in leaves())])
