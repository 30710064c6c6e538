"""YAML documents for people and kubectl: multi-line texts as blocks, and atomic writes."""

from __future__ import annotations

import errno
from pathlib import Path

import yaml

from holdfast.spec.errors import AccessDeniedError, NoSpaceError


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
        return Ordered((name, in_order(one)) for name, one in value.items())
    return [in_order(one) for one in value] if isinstance(value, list) else value


def as_yaml(*documents: object) -> str:
    """Documents as YAML for people: keys sorted except in `in_order` values, with multi-line texts as blocks."""
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=True, allow_unicode=True, width=120)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, completely or not at all. Raises AccessDeniedError or NoSpaceError."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else AccessDeniedError
        raise kind(f"{path}: cannot be written: {error.strerror}; name another file with --output") from error
