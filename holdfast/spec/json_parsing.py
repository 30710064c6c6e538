"""JSON from another process, version or person, parsed into a typed value or refused.

Promises one kind of failure: DataError, with the source, the place in it and the remedy. It is raised for text that is
not JSON or is nested too deeply. Numbers that are not finite, and other fields or types than those of `model`, raise it
too. Nothing else in Holdfast calls `json.loads` on text from outside (`tests/habits/test_json.py`).
"""

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import from_json

from holdfast.spec.errors import DataError

T = TypeVar("T")
JsonObject = dict[str, Any]
REMEDY = "delete it and run the same command again"


def parse_json(data: bytes | str, model: type[T], source: str, remedy: str = REMEDY) -> T:
    """The JSON in `data` as a value of `model`: a pydantic model, a dataclass, or a type such as `dict[str, Any]`.
    Numbers and texts are not converted into each other. Raises DataError, naming `source`."""
    parse_json_value(data, source, remedy)
    try:
        return cast(T, _adapter(cast(Hashable, model)).validate_json(data, strict=True))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        message = f"{place}: {problem['msg']}" if place else problem["msg"]
        raise DataError(f"{source}: is damaged ({message}); {remedy}") from None


def parse_json_lines(data: bytes, source: str, remedy: str = REMEDY, *, finite: bool = True) -> list[JsonObject]:
    """The objects in lines of JSON. Raises DataError, naming `source` and the line. Without `finite`, numbers may be
    NaN and Infinity, which occur in the metrics of a run that diverges."""
    lines = enumerate(data.splitlines(), 1)
    return [parse_json_object(line, f"{source}, line {n}", remedy, finite=finite) for n, line in lines if line]


def parse_json_object(data: bytes | str, source: str, remedy: str = REMEDY, *, finite: bool = True) -> JsonObject:
    """An object whose fields the caller checks. Faster than `parse_json`. Raises DataError, naming `source`."""
    value = parse_json_value(data, source, remedy, finite=finite)
    if not isinstance(value, dict):
        raise DataError(f"{source}: is damaged (it is not a JSON object); {remedy}")
    return value


def parse_json_value(data: bytes | str, source: str, remedy: str = REMEDY, *, finite: bool = True) -> Any:
    """Any JSON value with at most 200 levels. Raises DataError, naming `source`."""
    try:
        value = from_json(data, allow_inf_nan=not finite)
        if finite:
            _require_finite(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{source}: is damaged ({error}); {remedy}") from None
    return value


@lru_cache(maxsize=256)
def _adapter(model: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(model, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:  # the model has its own configuration
        return TypeAdapter(model)


def _require_finite(value: Any) -> None:
    """Raises ValueError for a number that overflows. The parser limits the depth."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number is too large")
    elif isinstance(value, dict):
        for item in value.values():
            _require_finite(item)
    elif isinstance(value, list):
        for item in value:
            _require_finite(item)
