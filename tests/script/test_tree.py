"""Plain values of a script become JSON and come back equal; everything else is refused with its path."""

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.script.tree import StateError, decode, differing_paths, encode, from_bytes, to_bytes

VALUES: dict[str, Any] = {
    "none": None,
    "flags": [True, False],
    "numbers": (1, -0.0, 1e-300, 2**80),
    "floats": [float("inf"), float("-inf")],
    "text": "zwölf ~",
    "bytes": b"\x00\xff",
    "keys": {1: "one", (2, "b"): "two", "~tuple": "no tag"},
    "counter": Counter({3: 2}),
    "order": OrderedDict([("z", 1), ("a", 2)]),
    "default": defaultdict(list, {"a": [1]}),
    "array": bytearray(b"\x01"),
    "empty": {},
}


def test_plain_values_come_back_equal_with_their_types_and_order() -> None:
    plain, tensors = encode(VALUES, "state")
    assert not tensors
    back = decode(from_bytes(to_bytes(plain), "state"), {}, "state")
    assert repr(back) == repr(VALUES)


def test_tensors_are_kept_apart_under_their_paths() -> None:
    value = {"ema": [torch.ones(2)], "seen": np.arange(3), "count": np.float32(1.5)}
    plain, tensors = encode(value, "state")
    assert sorted(tensors) == ["state/count", "state/ema/0", "state/seen"]
    back = decode(plain, tensors, "state")
    assert torch.equal(back["ema"][0], torch.ones(2))
    assert back["seen"].tolist() == [0, 1, 2]
    assert back["count"] == np.float32(1.5)
    assert type(back["count"]) is np.float32


def test_tensors_whose_paths_are_equal_are_kept_apart() -> None:
    value = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "1": np.arange(2), 1: np.arange(3)}
    plain, tensors = encode(value, "state")
    back = decode(plain, tensors, "state")
    assert (int(back["a/b"]), int(back["a"]["b"]), len(back["1"]), len(back[1])) == (1, 2, 2, 3)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [(_ for _ in ())]}, "state/a/0 is a builtins.generator"),
        ({"f": lambda: 0}, "state/f is a builtins.function"),
        ({"t": "\ud800"}, "state/t is text that is not Unicode"),
        ({"s": {1, 2}}, "state/s is a builtins.set"),
        ({"d": defaultdict(lambda: 0)}, "state/d is a defaultdict whose default is a function"),
        ({"i": 10**5000}, "state/i is an integer of 16610 bits"),
        ({"o": np.array([object()])}, "state/o is an array of object"),
        ({"x": torch.ones(2).to_sparse()}, "state/x is a tensor with the layout"),
    ],
)
def test_a_value_that_is_not_plain_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(StateError, match=path):
        encode(value, "state")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="contains itself"):
        encode(loop, "state")


def test_differences_of_two_trees_are_named_by_path() -> None:
    assert differing_paths({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ["a[1].b: 2 and 3"]
