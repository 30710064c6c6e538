"""The fields of the spec and the values that they take, as text, generated from the models.

Promises that error messages and the reference agree, because both use this module.
"""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from holdfast.spec.section import Role, Section, role_of
from holdfast.spec.tree import Spec


@dataclass(frozen=True)
class Leaf:
    """A field that holds a value, not a section."""

    path: str  # as in `data.sources[].uri`
    section: type[Section]
    name: str
    info: FieldInfo
    role: Role  # its own, or that of a section around it


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field of this type holds, directly or as the items of a list."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def is_list(annotation: Any) -> bool:
    """Whether a field of this type holds a list."""
    return get_origin(annotation) is tuple


def is_mapping(annotation: Any) -> bool:
    """Whether a field of this type maps names that the user chooses to values."""
    return get_origin(annotation) is dict


def leaves(section: type[Section] = Spec, prefix: str = "", around: Role = "identity") -> Iterator[Leaf]:
    """Every leaf of the tree, in the order of the models."""
    for name, info in section.model_fields.items():
        path = f"{prefix}{name}"
        role = role_of(section, name) if around == "identity" else around
        if inner := section_of(info.annotation):
            yield from leaves(inner, f"{path}[]." if is_list(info.annotation) else f"{path}.", role)
        else:
            yield Leaf(path, section, name, info, role)


def find(location: Sequence[int | str]) -> tuple[type[Section] | None, FieldInfo | None, bool]:
    """The section that contains a location, the field that it names, and whether it names an item of that field."""
    section: type[Section] | None = Spec
    info: FieldInfo | None = None
    owner: type[Section] | None = Spec
    item = False
    for part in location:
        if isinstance(part, int):
            item = True
            continue
        if info is not None and is_mapping(info.annotation):
            return owner, info, True
        if section is None or part not in section.model_fields:
            return section, None, False
        owner, info, item = section, section.model_fields[part], False
        section = section_of(info.annotation)
    return owner, info, item


def allowed(info: FieldInfo, item: bool = False) -> str:
    """What a field (or an item of its list) takes: "a whole number from 1 to 1000, or null"."""
    kinds, optional = _kinds(info.annotation)
    (kind,) = kinds
    limits = _limits(info)
    if is_list(kind):
        inner = get_args(kind)[0]
        if item:
            return _one(inner, {})
        most, least = limits.get("max_length"), limits.get("min_length")
        bounds = " and ".join(f"at {word} {n}" for word, n in (("least", least), ("most", most)) if n)
        return f"a list of {bounds} items, each {_one(inner, {})}" if bounds else f"a list, each item {_one(inner, {})}"
    if is_mapping(kind):
        name, value = get_args(kind)
        return f"names with values: each name {_one(name, {})}, each value {_one(value, {})}"
    return _one(kind, limits) + (", or null" if optional else "")


def default(info: FieldInfo) -> object:
    """The default of a field. PydanticUndefined if it is required."""
    if info.default_factory is not None:
        return PydanticUndefined
    return info.default


def _kinds(annotation: Any) -> tuple[list[Any], bool]:
    """The types of a union, and whether null is one of them."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds, len(kinds) < len(get_args(annotation))
    return [annotation], False


def _limits(info: FieldInfo) -> dict[str, Any]:
    return _limits_in(info.metadata)


def _limits_in(metadata: Sequence[Any]) -> dict[str, Any]:
    names = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
    return {
        name: getattr(constraint, name)
        for constraint in metadata
        for name in names
        if getattr(constraint, name, None) is not None
    }


def _one(kind: Any, limits: dict[str, Any]) -> str:
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
        limits = _limits_in(metadata)
    if get_origin(kind) is Literal:
        choices = ", ".join(f"`{choice}`" for choice in get_args(kind))
        return f"one of {choices}" if len(get_args(kind)) > 1 else choices
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a group of fields ({', '.join(kind.model_fields)})"
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a whole number" + _range(_whole(limits))
    if kind is float:
        return "a number" + _range(limits)
    text = "text"
    if limits.get("min_length"):
        text = "text that is not empty"
    if pattern := limits.get("pattern"):
        text = f"text of the form `{pattern}`"
    return text


def _whole(limits: dict[str, Any]) -> dict[str, Any]:
    """Limits of whole numbers, as inclusive limits."""
    inclusive = {name: limit for name, limit in limits.items() if name in ("ge", "le")}
    if "gt" in limits:
        inclusive["ge"] = limits["gt"] + 1
    if "lt" in limits:
        inclusive["le"] = limits["lt"] - 1
    return inclusive


def _range(limits: dict[str, Any]) -> str:
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']} to {limits['le']}"
    phrases = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = " and ".join(f"{phrases[name]} {limits[name]}" for name in phrases if name in limits)
    return f" of {bounds}" if bounds.startswith("at ") else f" {bounds}" if bounds else ""
