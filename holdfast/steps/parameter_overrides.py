"""Parameters of the DAG that are fields of the spec: their values, and a person's changes.

An unchanged compiled parameter changes nothing, even if the spec next to it was replaced.
"""

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from pydantic import BaseModel

from holdfast.spec.errors import DataError, Problem, SpecError
from holdfast.spec.json_parsing import parse_json_value
from holdfast.spec.tree import Spec
from holdfast.steps.table import FIELDS, PARAMETERS

LONG_VALUE = 8192  # bytes of JSON: a longer value is not repeated outside the spec, which engines pass in one argument


def parameter_values(spec: Spec) -> dict[str, Any]:
    """The parameters that are fields of the spec, with the spec's values as JSON. A long list is replaced by an
    empty one."""
    values = {name: _plain(reduce(getattr, field.split("."), spec)) for name, field in FIELDS.items()}
    return {name: [] if isinstance(value, list) and _is_long(value) else value for name, value in values.items()}


def changed_parameters(given: Mapping[str, Any], compiled: Mapping[str, Any]) -> list[str]:
    """Overrides for those of the parameters `given` that differ from `compiled`. A value may be text, as every
    parameter is on Argo. None, an empty text and an empty list count as not given. Raises SpecError."""
    changed = []
    for name, field in FIELDS.items():
        value = given.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, str):
            value = _read(name, value)
        if value == []:
            continue
        if name not in compiled or value != compiled[name]:
            changed.append(f"{field}={json.dumps(value)}")
    return changed


def _is_long(value: list[Any]) -> bool:
    return len(json.dumps(value, ensure_ascii=False).encode()) > LONG_VALUE


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(name: str, text: str) -> Any:
    try:
        return parse_json_value(text, name)
    except DataError:
        kind = {int: "a whole number", float: "a number"}.get(type(PARAMETERS[name].default), "a JSON list")
        problem = Problem(name, text, f"is not {kind}", f"it becomes {FIELDS[name]} of the spec")
        raise SpecError([problem], "parameters") from None
