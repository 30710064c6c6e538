"""YAML documents for people and kubectl: multi-line texts as blocks, and atomic writes."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from holdfast.pipelines.paths import fill_from_model
from holdfast.runtime.environment import make_folder
from holdfast.spec.errors import AccessDeniedError, NoSpaceError
from holdfast.spec.fields import find
from holdfast.spec.load import parse_spec


class Dumper(yaml.SafeDumper):
    """A YAML dumper with multi-line texts as literal blocks, and without anchors: a repeated value is written twice."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


class Ordered(dict[str, object]):
    """A dictionary whose key order `as_yaml` keeps."""


def _ordered(dumper: yaml.SafeDumper, value: Ordered) -> yaml.MappingNode:
    return dumper.represent_mapping("tag:yaml.org,2002:map", list(value.items()))


Dumper.add_representer(str, _text)
Dumper.add_representer(Ordered, _ordered)


def in_order(value: object) -> object:
    """A JSON value in which `as_yaml` keeps the order of all keys."""
    if isinstance(value, dict):
        return Ordered((name, in_order(item)) for name, item in value.items())
    return [in_order(item) for item in value] if isinstance(value, list) else value


def as_yaml(*documents: object) -> str:
    """Documents as YAML for people: keys sorted except in `in_order` values, with multi-line texts as blocks."""
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=True, allow_unicode=True, width=120)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, completely or not at all. Raises AccessDeniedError or NoSpaceError."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        make_folder(path.absolute().parent)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
        raise kind(f"{path}: cannot be written: {error.strerror}; name another file with --output") from error


# Edits of fields in a spec file that keep every other character.


def write_fields(path: Path, fields: Mapping[str, Any], *, check: bool = True) -> list[str]:
    """Write `fields` (dotted names with simple values) into the spec at `path`. Returns the changes.

    A field that already has the value is skipped, and so is a missing field whose default is the value. With `check`,
    raises SpecError for a resulting invalid spec and leaves the file unchanged.
    """
    text, changes = path.read_text(encoding="utf-8"), []
    for field, value in fields.items():
        _, info, _ = find(field.split("."))
        previous, text = text, _with(text, field.split("."), value, None if info is None else info.default)
        if text != previous:
            changes.append(f"{field}: {value}")
    if changes:
        if check:
            parse_spec(text, source=str(path), fill=fill_from_model)
        write_whole(path, text)
    return changes


def _with(text: str, path: list[str], value: Any, default: Any) -> str:
    """The text with one field changed."""
    node: yaml.Node = yaml.compose(text, Loader=yaml.SafeLoader)  # type: ignore[assignment]
    owner = node
    remaining = list(path)
    while remaining and isinstance(node, yaml.MappingNode):
        child = next((value_node for key, value_node in node.value if key.value == remaining[0]), None)
        if child is None:
            break
        owner, node = node, child
        remaining.pop(0)
    if not remaining:
        if yaml.SafeLoader("").construct_object(node, deep=True) == value:
            return text
        return f"{text[: node.start_mark.index]}{_word(value)}{text[_end(node) :]}"
    if value == default:
        return text
    if not isinstance(node, yaml.MappingNode):  # a section with only its name
        return f"{text[: node.start_mark.index]} {{{_flow(remaining, value)}}}{text[node.end_mark.index :]}"
    return _added(text, node, remaining, value, top=node is owner and len(remaining) > 1)


def _added(text: str, node: yaml.MappingNode, left: list[str], value: Any, *, top: bool) -> str:
    """The text with a new field after the last one of a mapping."""
    if node.flow_style:
        at = node.end_mark.index - 1
        return f"{text[:at].rstrip()}{', ' if node.value else ''}{_flow(left, value)}{text[at:]}"
    end = _end(node)
    line = text.find("\n", max(0, end - 1))
    head, tail = (text + "\n", "") if line < 0 else (text[: line + 1], text[line + 1 :])
    indent = " " * node.start_mark.column
    added = f"\n{left[0]}:\n  {_flow(left[1:], value)}\n" if top else f"{indent}{_flow(left, value)}\n"
    return f"{head}{added}{tail}"


def _end(node: yaml.Node) -> int:
    """The end of the last value of a node. A block node itself ends only where the next node begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _flow(path: list[str], value: Any) -> str:
    first, *rest = path
    return f"{first}: {{{_flow(rest, value)}}}" if rest else f"{first}: {_word(value)}"


def _word(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
