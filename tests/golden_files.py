"""Golden files: one complete YAML file, and for each related file only its differences, one line per value.

A change that all of them share appears once in a review. HOLDFAST_UPDATE_GOLDEN=1 accepts the rendered text.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Small mappings and lists on one line each, text with several lines as it is."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, "|" if "\n" in text else None)
)


def golden_of(folder: Path, name: str = "quickstart", base: str = "quickstart") -> tuple[Path, Path | None]:
    """The golden file of an example in `folder`, and the file that it is compared with."""
    full = folder / f"{base}.yaml"
    return (full, None) if name == base else (folder / f"{name}.diff", full)


def assert_golden(text: str, golden: Path, base: Path | None = None) -> None:
    """The YAML `text` holds the data of the golden file: YAML without a `base`, otherwise a difference."""
    documents = list(yaml.safe_load_all(text))
    if base:
        text = difference(list(yaml.safe_load_all(base.read_text(encoding="utf-8"))), documents)
    else:
        text = yaml.dump_all(documents, Dumper=_Dumper, default_flow_style=None, sort_keys=False, width=120)
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text.splitlines() == golden.read_text(encoding="utf-8").splitlines()


def difference(base: Any, other: Any) -> str:
    """What to change in `base` to get `other`: each value to set (`+ place value`), each place to remove (`- place`),
    and each numbered copy (`+ place like sibling`), which the lines below it change."""
    return "".join(f"{line}\n" for line in _changes(_named(base), _named(other), ""))


def _changes(before: Any, after: Any, place: str) -> Iterator[str]:
    if not (before and after and isinstance(before, dict) and isinstance(after, dict)):
        if json.dumps(before, default=str) != json.dumps(after, default=str):  # 1, 1.0 and true are equal in Python
            yield from (f"+ {below} {value}" for below, value in _values(after, place))
        return
    yield from (f"- {_join(place, key)}" for key in sorted(before.keys() - after.keys()))
    for key in sorted(after):
        original = key if key in before else _original(key, {*before, *after})
        if original not in (key, None):
            yield f"+ {_join(place, key)} like {original}"
        if original is None:
            yield from (f"+ {below} {value}" for below, value in _values(after[key], _join(place, key)))
        else:
            yield from _changes(before.get(original, after.get(original)), after[key], _join(place, key))


def _original(name: str, names: set[str]) -> str | None:
    """What the numbered `name` is a copy of: `train` or `train-1` for `train-2`."""
    if not (match := re.fullmatch(r"(.*)-(\d+)(]?)", name)):
        return None
    stem, number, end = match.groups()
    return next((one for one in (f"{stem}{end}", f"{stem}-{int(number) - 1}{end}") if one in names), None)


def _named(thing: Any) -> Any:
    """`thing` with a dictionary for each list: items with distinct names under their names, others by position."""
    if isinstance(thing, dict):
        return {str(key): _named(value) for key, value in thing.items()}
    if not isinstance(thing, list) or not thing:
        return thing
    names = [item.get("name") if isinstance(item, dict) else None for item in thing]
    order = {}
    if None in names or len({*names}) < len(names):
        names = [str(number) for number in range(len(thing))]
    else:
        order = {"*": json.dumps(names)}
    return order | {f"[{name}]": _named(item) for name, item in zip(names, thing, strict=True)}


def _values(thing: Any, place: str) -> Iterator[tuple[str, str]]:
    """Each place in a named tree, with its value as JSON."""
    if isinstance(thing, dict) and thing:
        for key in sorted(thing):
            yield from _values(thing[key], _join(place, key))
    else:
        yield place, json.dumps(thing, default=str)


def _join(place: str, key: str) -> str:
    """The place of `key`: keys with dots between them (a dot in a key is `~1`)."""
    name = key.replace("~", "~0").replace(".", "~1")
    return f"{place}.{name}" if place else name
