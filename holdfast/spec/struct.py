"""A spec as a protobuf Struct, which is what KFP makes of a dictionary.

A Struct has one kind of number, a double, and no order of names, and KFP's compiler takes no null in it. `to_struct`
writes whole numbers that a double cannot hold as text, which `parse_spec` reads as the same number, and null as the
text "(null)"; `from_struct` makes whole numbers of doubles that are whole, and null of that text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.spec import strict_yaml

EXACT = 2**53  # every whole number up to here is a double
NULL = "(null)"
_LIKE_NULL = re.compile(r"\(+null\)+")  # such a text gets parentheses on its way


def to_struct(value: Any) -> Any:
    """A JSON value in a form that a Struct holds without loss."""
    if value is None:
        return NULL
    if isinstance(value, str) and _LIKE_NULL.fullmatch(value):
        return f"({value})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return str(value)
    return _each(value, to_struct)


def from_struct(value: Any) -> Any:
    """The value that `to_struct` was given, for `parse_spec`."""
    if isinstance(value, str) and _LIKE_NULL.fullmatch(value):
        return None if value == NULL else value[1:-1]
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return _each(value, from_struct)


def text_of(spec: str | Mapping[str, Any]) -> str:
    """A spec as YAML, given as that or as a dictionary."""
    return spec if isinstance(spec, str) else strict_yaml.write(from_struct(spec))


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: change(one) for name, one in value.items()}
    return [change(one) for one in value] if isinstance(value, (list, tuple)) else value
