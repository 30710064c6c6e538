"""A spec as a protobuf Struct, which KFP uses for a dictionary.

A Struct has one kind of number, a double, and does not keep the order of names. KFP's compiler accepts no null in it.

- `to_struct` writes whole numbers that a double cannot hold as text, which `parse_spec` reads as the same number. It
  writes null as the text "(null)".
- `from_struct` converts whole doubles to whole numbers, and that text to null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.spec import strict_yaml

EXACT = 2**53  # a double can hold every whole number up to here
NULL = "(null)"
_LIKE_NULL = re.compile(r"\(+null\)+")  # such a text gets extra parentheses in a Struct


def to_struct(value: Any) -> Any:
    """A JSON value in a form that a Struct can hold without loss."""
    if value is None:
        return NULL
    if isinstance(value, str) and _LIKE_NULL.fullmatch(value):
        return f"({value})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value)
    return _each(value, to_struct)


def from_struct(value: Any) -> Any:
    """The value that was passed to `to_struct`, for `parse_spec`."""
    if isinstance(value, str) and _LIKE_NULL.fullmatch(value):
        return None if value == NULL else value[1:-1]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return _each(value, from_struct)


def text_of(spec: str | Mapping[str, Any]) -> str:
    """A spec as YAML text, from YAML text or a dictionary."""
    return spec if isinstance(spec, str) else strict_yaml.write(from_struct(spec))


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: change(one) for name, one in value.items()}
    return [change(one) for one in value] if isinstance(value, (list, tuple)) else value
