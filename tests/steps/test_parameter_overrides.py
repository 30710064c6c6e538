"""DAG parameters that are fields of the spec: typed, with the spec's values as defaults, and without effect if
unchanged.
"""

import json
from pathlib import Path

import pytest

from holdfast.spec import SpecError, load_spec, parse_spec, run_id
from holdfast.spec.load import dump_spec
from holdfast.steps import FIELDS, PARAMETERS, parameter_values
from holdfast.steps.parameter_overrides import changed_parameters

ROOT = Path(__file__).parents[2]
SPEC = load_spec(ROOT / "examples/quickstart.yaml")
VALUES = parameter_values(SPEC)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_a_value_of_the_right_kind_for_each(example: Path) -> None:
    values = parameter_values(load_spec(example))
    assert values.keys() == FIELDS.keys()
    assert {name: type(value) for name, value in values.items()} == {
        name: type(PARAMETERS[name].default) for name in values
    }


def test_unchanged_parameters_do_not_change_the_identity() -> None:
    assert changed_parameters(VALUES, VALUES) == []
    texts = {name: json.dumps(value) for name, value in VALUES.items()}  # as on Argo
    assert changed_parameters(texts, VALUES) == []
    assert changed_parameters(dict.fromkeys(VALUES, ""), VALUES) == []
    assert changed_parameters({}, VALUES) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 50), ("learning_rate", 1e-05), ("layers", 2), ("hidden", 96), ("heads", 2),
        ("data", [{"uri": "s3://bucket/{{braces}} and: 'quotes'", "weight": 0.5}]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_text", [False, True], ids=["KFP", "Argo"])
def test_a_changed_parameter_changes_its_field_and_the_run_id(name: str, value: object, as_text: bool) -> None:
    values = {**VALUES, name: json.dumps(value) if as_text else value}
    changed = parse_spec(dump_spec(SPEC), changed_parameters(values, VALUES))
    assert parameter_values(changed) == {**VALUES, name: value}
    assert changed.model_copy(update={"data": SPEC.data}) == changed or name == "data"
    if name != "data":  # its id is that of its content
        assert run_id(changed, "d") != run_id(SPEC, "d")


def test_the_same_value_written_in_another_way_is_the_same() -> None:
    assert changed_parameters({"learning_rate": "1.0E-3"}, {"learning_rate": 0.001}) == []
    assert changed_parameters({"steps": 300.0}, {"steps": 300}) == []


@pytest.mark.parametrize(("name", "text"), [("steps", "many"), ("data", "s3://bucket/text"), ("learning_rate", "1e-")])
def test_an_unreadable_value_is_reported_with_its_field(name: str, text: str) -> None:
    with pytest.raises(SpecError, match=FIELDS[name]) as error:
        changed_parameters({name: text}, VALUES)
    assert name in str(error.value)
    assert text in str(error.value)
