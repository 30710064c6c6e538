"""Python values as canonical JSON, with their tensors apart.

A tree of plain values becomes JSON text, which is saved as a tensor of bytes. It is part of the state digest like any
weight, and nothing is pickled. Other values are refused with their path. The order of a dictionary is kept, because
the code that reads it may depend on it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.spec.errors import DataError, UserCodeError
from holdfast.spec.json_parsing import parse_json_object

DEEPEST = 48  # levels of nesting
_TAG = "~"  # begins the only key of an object that stands for something else
_REMEDY = "give the object state_dict() and load_state_dict(), or leave it out"


class StateError(UserCodeError):
    """State of a script that a checkpoint cannot hold, or that does not fit the checkpoint."""


def encode(value: object, path: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A value as plain JSON, and its tensors by their names, which begin with `path`. Raises StateError, with the path,
    for a value that is not plain."""
    tensors: dict[str, torch.Tensor] = {}
    return _plain(value, path, tensors, 0), tensors


def decode(plain: Any, tensors: Mapping[str, torch.Tensor], source: str) -> Any:
    """The value that `encode` made plain. Raises DataError, naming `source`, for other JSON."""
    try:
        return _value(plain, tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{source}: is not the state of a script ({error!r})") from None


def to_bytes(plain: Any) -> torch.Tensor:
    """Plain JSON as a tensor of bytes."""
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_bytes(data: torch.Tensor, source: str) -> dict[str, Any]:
    """The JSON object in a tensor of bytes. Raises DataError, naming `source`."""
    return parse_json_object(data.numpy().tobytes(), source)


def differing_paths(first: Any, second: Any) -> list[str]:
    """The paths at which plain values differ, at most five."""
    found: list[str] = []
    _compare(first, second, "", found)
    return found[:5]


def _compare(first: Any, second: Any, path: str, found: list[str]) -> None:
    if isinstance(first, dict) and isinstance(second, dict) and list(first) == list(second):
        for key in first:
            _compare(first[key], second[key], f"{path}.{key}" if path else key, found)
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            _compare(one, other, f"{path}[{index}]", found)
    elif first != second:
        found.append(f"{path}: {str(first)[:60]} and {str(second)[:60]}")


def _plain(value: object, path: str, tensors: dict[str, torch.Tensor], depth: int) -> Any:  # noqa: PLR0911, PLR0912 - by type
    if depth > DEEPEST:
        raise StateError(f"{path} is nested more than {DEEPEST} levels deep, or contains itself; {_REMEDY}")
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str) and type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise StateError(f"{path} is text that is not Unicode; save its bytes") from None
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {f"{_TAG}float": repr(value)}
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise StateError(f"{path} is a tensor with the layout {value.layout}; use a dense one")
        tensors[path] = value
        return {f"{_TAG}tensor": path}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or array.dtype.byteorder == ">":
            raise StateError(f"{path} is an array of {array.dtype}; use numbers")
        tensors[path] = torch.from_numpy(array.copy() if isinstance(value, np.generic) else np.ascontiguousarray(array))
        return {f"{_TAG}array" if isinstance(value, np.ndarray) else f"{_TAG}number": path}
    if type(value) in (bytes, bytearray):
        return {f"{_TAG}bytes": bytes(value).hex()}  # type: ignore[call-overload]
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        pairs = [
            (_plain(key, f"the key {key!r} of {path}", tensors, depth + 1), item, f"{path}/{key}")
            for key, item in value.items()
        ]
        items = [(key, _plain(item, below, tensors, depth + 1)) for key, item, below in pairs]
        if isinstance(value, Counter):
            return {f"{_TAG}counter": [list(pair) for pair in items]}
        if all(type(key) is str and not key.startswith(_TAG) for key, _ in items):
            return dict(items)
        return {f"{_TAG}map": [list(pair) for pair in items]}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        rows = [_plain(item, f"{path}/{index}", tensors, depth + 1) for index, item in enumerate(value)]
        return rows if type(value) is list else {f"{_TAG}tuple": rows}
    raise StateError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which is not saved; {_REMEDY}")


def _value(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: PLR0911 - by tag
    if isinstance(plain, list):
        return [_value(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not (name := next(iter(plain))).startswith(_TAG):
        return {key: _value(item, tensors) for key, item in plain.items()}
    content = plain[name]
    match name[len(_TAG) :]:
        case "float":
            return float(content)
        case "tensor":
            return tensors[content]
        case "array":
            return tensors[content].numpy()
        case "number":
            return tensors[content].numpy()[()]
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple(_value(item, tensors) for item in content)
        case "map" | "counter" as kind:
            pairs = {_value(key, tensors): _value(item, tensors) for key, item in content}
            return Counter(pairs) if kind == "counter" else pairs
    raise ValueError(f"the tag {name!r} is not known")
