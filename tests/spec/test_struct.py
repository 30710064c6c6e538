"""A spec as the dictionary of a form. KFP stores it as a protobuf Struct, whose numbers are doubles
without an order.
"""

import json
import random
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from kfp.compiler.pipeline_spec_builder import to_protobuf_value

from holdfast.spec import Spec, SpecError, digest, dump_spec, parse_spec, run_id, strict_yaml
from holdfast.spec.engine_text import from_struct, text_of, to_struct
from holdfast.spec.fields import leaves
from holdfast.spec.load import dump_written, written_spec

BASE = {"name": "x", "data": {"sources": [{"uri": "a"}]}}
TEXTS = (
    "2026-01-01",
    "12:30",
    "null",
    "1e-4",
    "9007199254740993",
    "true",
    "é {{x}}",
    "",
    "(null)",
    "((null))",
    "(null",
)
FIELDS = tuple(leaf.path for leaf in leaves() if "[]" not in leaf.path)
values = st.one_of(
    st.sampled_from([1e-4, 1e22, 5e-324, 0.1, 1, 2, 64, 2**53, 2**53 + 1, 2**63 - 1, True, False, None, *TEXTS]),
    st.lists(st.sampled_from(TEXTS), max_size=3),
    st.dictionaries(st.sampled_from(["a", "z/y", "B"]), st.sampled_from(TEXTS), max_size=3),
)


def through_kfp(value: dict[str, Any]) -> dict[str, Any]:
    """A dictionary after a round trip through a Struct. The launcher gives the names in any order."""
    struct = json_format.MessageToDict(json_format.ParseDict(value, struct_pb2.Struct()))
    return _shuffled(struct)


def _shuffled(value: Any) -> Any:
    if not isinstance(value, dict):
        return [_shuffled(item) for item in value] if isinstance(value, list) else value
    names = list(value)
    random.Random(len(names)).shuffle(names)
    return {name: _shuffled(value[name]) for name in names}


def spec_with(changes: list[tuple[str, Any]]) -> Spec | None:
    try:
        return parse_spec(strict_yaml.write(BASE), [f"{name}={strict_yaml.write(value)}" for name, value in changes])
    except SpecError:
        return None


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), values), max_size=3))
def test_a_spec_arrives_at_the_steps_as_it_was_written(changes: list[tuple[str, Any]]) -> None:
    # Most fields refuse most values. Trying each change alone finds the valid ones.
    for spec in filter(None, map(spec_with, [changes, *([change] for change in changes)])):
        arrived = through_kfp(struct := to_struct(written_spec(spec)))
        to_protobuf_value(struct)
        assert parse_spec(from_struct(arrived)) == spec
        assert parse_spec(text_of(arrived)) == spec  # the exit handler reads this
        assert parse_spec(dump_written(spec)) == spec  # Argo shows this
        assert run_id(parse_spec(from_struct(arrived)), "d") == run_id(spec, "d")


def test_null_is_no_null_in_what_kfp_compiles_and_null_again_at_the_steps() -> None:
    spec = parse_spec(strict_yaml.write(BASE), ["training.clip_norm=null", 'cluster.environment={A: "(null)"}'])
    struct = to_struct(written_spec(spec))
    to_protobuf_value(struct)  # a null would be refused
    parsed = parse_spec(from_struct(through_kfp(struct)))
    assert parsed == spec
    assert parsed.training.clip_norm is None
    assert parsed.cluster.environment == {"A": "(null)"}
    edited = {**struct, "training": {"clip_norm": None}}  # as a person may write it in the form
    assert parse_spec(from_struct(through_kfp(edited))) == spec


@pytest.mark.parametrize("seed", [2**53, 2**53 + 1, 2**63 - 1])
def test_a_large_seed_is_exact(seed: int) -> None:
    spec = parse_spec(strict_yaml.write(BASE), [f"training.seed={seed}"])
    parsed = parse_spec(from_struct(through_kfp(to_struct(written_spec(spec)))))
    assert parsed.training.seed == seed


def test_a_written_spec_has_only_the_given_fields_in_order() -> None:
    spec = parse_spec("training: {steps: 100, batch_ramp: {}}\nname: x\ndata: {sources: [{uri: a}]}\nstore: null")
    expected = '{"name": "x", "store": null, "data": {"sources": [{"uri": "a"}]}, '
    assert json.dumps(written_spec(spec)) == expected + '"training": {"steps": 100, "batch_ramp": {}}}'
    assert digest(written_spec(spec)) != digest(spec.model_dump(mode="json"))
    assert parse_spec(dump_spec(spec)) == spec


@pytest.mark.parametrize(
    ("given_spec", "says"),
    [
        ({}, "name: is required"),
        ({**BASE, "training": {"steps": 1.5}}, "training.steps: is not a whole number"),
        ({**BASE, "trainin": {}}, "trainin: is not a field of the spec"),
        ({**BASE, "version": 2.0}, "comes from a newer Holdfast"),
        ({**BASE, "training": "many"}, "training: is not a group of fields"),
    ],
)
def test_a_dictionary_is_checked_as_a_text_is_and_no_line_is_reported(given_spec: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(from_struct(given_spec))
    assert says in str(error.value)
    assert not any(problem.place for problem in error.value.problems)
