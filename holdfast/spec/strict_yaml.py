"""Strict YAML: the JSON-like core of YAML 1.2, without surprises.

- `no`, `12:30` and `2024-01-01` stay text, and `1e-3` is a number.
- A key that is given twice is refused. So are tags, merge keys, and aliases (a bounded file could grow without bound).
- Every refusal is one exception with a place.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

Place = tuple[int, int]  # line and column, from 1
Path = tuple[str, ...]  # names and indexes, from the root


class YamlRefusedError(Exception):
    """Text that is not valid YAML for a spec, with the place of the fault if it is known."""

    def __init__(self, message: str, place: Place | None = None) -> None:
        super().__init__(message)
        self.place = place


def read(text: str) -> Any:
    """The value of the YAML `text`: dict, list, str, int, float, bool or None. Raises YamlRefusedError."""
    return read_placed(text)[0]


def read_placed(text: str) -> tuple[Any, dict[Path, Place]]:
    """The value of the YAML `text`, and the place of each key and item. Raises YamlRefusedError."""
    places: dict[Path, Place] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, places
        _note(node, (), places)
        return loader.construct_document(node), places
    except yaml.reader.ReaderError as error:
        raise YamlRefusedError(
            f"{chr(error.character)!r} at position {error.position} is not a printable character"
        ) from None
    except yaml.MarkedYAMLError as error:
        place = _place(error.problem_mark) if error.problem_mark else None
        raise YamlRefusedError(error.problem or "cannot be read", place) from None
    except RecursionError:
        raise YamlRefusedError("it is nested too deeply") from None


def write(value: Any) -> str:
    """`value` as YAML. `read` returns the same value, and so does a reader of YAML 1.1."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _place(mark: yaml.Mark) -> Place:
    return mark.line + 1, mark.column + 1


def _note(node: yaml.Node, path: Path, places: dict[Path, Place]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            places[*path, str(key.value)] = _place(key.start_mark)
            _note(value, (*path, str(key.value)), places)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places[*path, str(index)] = _place(item.start_mark)
            _note(item, (*path, str(index)), places)


def _refused(message: str, there: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, message, there.start_mark)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaced, so that none is inherited

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refused("aliases (*name) are not supported; write the value out", event)
        if getattr(event, "tag", None) is not None:
            raise _refused(f"tags ({event.tag}) are not supported; write the plain value", event)
        if isinstance(event, yaml.ScalarEvent):
            if "\0" in event.value:  # no path, argument or variable can hold it
                raise _refused("a NUL character is not supported; leave it out", event)
            if not event.value.isascii():
                event.value = _joined(event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused("keys must be plain words", key_node)
            if key_node.value in seen:
                raise _refused(f"{key_node.value!r} is given twice", key_node)
            seen.add(key_node.value)
            key_node.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge keys (<<) are ordinary keys, and therefore unknown fields."""


def _joined(event: Any) -> str:
    """The text of a scalar. JSON writes a character beyond U+FFFF as two escapes, which YAML reads as two halves."""
    try:
        return str(event.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le"))
    except UnicodeDecodeError:
        raise _refused("half of a pair of surrogates is no character; write the character", event) from None


def _number(_: _Loader, node: yaml.ScalarNode) -> int:
    if len(node.value) > 100:
        raise _refused(f"a number of {len(node.value)} digits is too long", node)
    return int(node.value, 0 if node.value.lower().startswith(("0x", "0o")) else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that this reader or a reader of YAML 1.1 would not read as text."""

    def ignore_aliases(self, _: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.Node:
        # Other styles do not preserve line separators of Unicode.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _number)
