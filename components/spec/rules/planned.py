"""Machinery that does not exist yet: its fields are part of the schema, and keep the values that work today."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

from holdfast.components.spec.errors import Problem
from holdfast.components.spec.tree import Spec

# field -> the values that work today
NOT_YET: dict[str, tuple[object, ...]] = {
    "training.precision": ("fp32", "bf16", "fp16"),
}


def value_at(spec: Spec, field: str, absent: object) -> object:
    """The value at a dotted path, such as `training.steps`; `absent` when a part of it was refused."""
    try:
        return reduce(getattr, field.split("."), spec)
    except AttributeError:
        return absent


def not_yet(spec: Spec) -> Iterator[Problem]:
    """Fields whose machinery does not exist yet keep their working values."""
    for field, working in NOT_YET.items():
        value = value_at(spec, field, working[0])
        if value not in working:
            shown = " or ".join(repr(choice) for choice in working)
            yield Problem(field, value, "is planned and does not work in this version", f"use {shown}")
