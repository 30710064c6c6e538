"""Python values as canonical JSON, with their tensors apart.

A tree of plain values becomes JSON text, which is saved as a tensor of bytes. It is part of the state digest like any
weight, and nothing is pickled. Other values are refused with their path. The order of a dictionary is kept, because
the code that reads it may depend on it.
"""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.spec.errors import DataError, UserCodeError
from holdfast.spec.json_parsing import parse_json_object

DEEPEST = 48  # levels of nesting
_MAX_INTEGER = 1 << 4096  # Python writes integers of up to 4,300 digits as text
_DEFAULTS = {one.__name__: one for one in (bool, int, float, str, list, dict, set)}  # of a defaultdict
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
    if value is None or type(value) is bool:
        return value
    if type(value) is int:
        if abs(value) >= _MAX_INTEGER:
            raise StateError(f"{path} is an integer of {value.bit_length()} bits; save its bytes")
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
        return {f"{_TAG}tensor": _keep(value, path, tensors)}
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind not in "biufc" or array.dtype.byteorder == ">":
            raise StateError(f"{path} is an array of {array.dtype}; use numbers")
        tensor = torch.from_numpy(array.copy() if isinstance(value, np.generic) else np.ascontiguousarray(array))
        return {f"{_TAG}{'array' if isinstance(value, np.ndarray) else 'number'}": _keep(tensor, path, tensors)}
    if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
        return {f"{_TAG}{type(value).__name__}": value.hex()}
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        pairs = [
            (_plain(key, f"the key {key!r} of {path}", tensors, depth + 1), item, f"{path}/{key}")
            for key, item in value.items()
        ]
        items = [(key, _plain(item, below, tensors, depth + 1)) for key, item, below in pairs]
        if isinstance(value, Counter | OrderedDict):
            kind = "counter" if isinstance(value, Counter) else "ordered"
            return {f"{_TAG}{kind}": [list(pair) for pair in items]}
        if isinstance(value, defaultdict):
            factory = getattr(value.default_factory, "__name__", "")
            if _DEFAULTS.get(factory) is not value.default_factory:
                raise StateError(f"{path} is a defaultdict whose default is a function; use a dict")
            return {f"{_TAG}default": [factory, [list(pair) for pair in items]]}
        if all(type(key) is str and not key.startswith(_TAG) for key, _ in items):
            return dict(items)
        return {f"{_TAG}map": [list(pair) for pair in items]}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        rows = [_plain(item, f"{path}/{index}", tensors, depth + 1) for index, item in enumerate(value)]
        return rows if type(value) is list else {f"{_TAG}tuple": rows}
    raise StateError(f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which is not saved; {_REMEDY}")


def _keep(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> str:
    """Add a tensor under its path, which another one may have: keys can contain `/`. Returns its name."""
    while path in tensors:
        path += _TAG
    tensors[path] = tensor
    return path


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
        case "bytes" | "bytearray" as kind:
            data = bytes.fromhex(content)
            return data if kind == "bytes" else bytearray(data)
        case "tuple":
            return tuple(_value(item, tensors) for item in content)
        case "default":
            factory, pairs = content
            return defaultdict(_DEFAULTS[factory] if factory else None, _pairs(pairs, tensors))
        case "map" | "counter" | "ordered" as kind:
            return {"map": dict, "counter": Counter, "ordered": OrderedDict}[kind](_pairs(content, tensors))
    raise ValueError(f"the tag {name!r} is not known")


def _pairs(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {_value(key, tensors): _value(item, tensors) for key, item in content}
