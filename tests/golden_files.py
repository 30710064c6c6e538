"""Golden files: one complete YAML file, and for each related file only its differences, one line per value.

A change that all of them share appears once in a review. HOLDFAST_UPDATE_GOLDEN=1 accepts the rendered text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


def golden_of(folder: Path, name: str = "quickstart", base: str = "quickstart") -> tuple[Path, Path | None]:
    """The golden file of an example in `folder`, and the file that it is compared with."""
    full = folder / f"{base}.yaml"
    return (full, None) if name == base else (folder / f"{name}.diff", full)


def assert_golden(text: str, golden: Path, base: Path | None = None) -> None:
    """The YAML `text` holds the data of the golden file: YAML without a `base`, otherwise a difference."""
    documents = list(yaml.safe_load_all(text))
    if base:
        text = difference(list(yaml.safe_load_all(base.read_text(encoding="utf-8"))), documents)
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    recorded = golden.read_text(encoding="utf-8")
    if base:
        assert text.splitlines() == recorded.splitlines()
    else:
        assert documents == list(yaml.safe_load_all(recorded))


def difference(base: Any, other: Any) -> str:
    """The values of `other` that `base` does not have (`+`), and the places that only `base` has (`-`)."""
    before, after = dict(_values(base)), dict(_values(other))
    changed = [f"+ {place} {value}\n" for place, value in after.items() if before.get(place) != value]
    return "".join([*changed, *(f"- {place}\n" for place in sorted(before.keys() - after.keys()))])


def _values(thing: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Each place, with its value as JSON: keys with dots between them (a dot in a key is `~1`). Items with distinct
    names appear under their names."""
    if not isinstance(thing, dict | list) or not thing:
        yield place or ".", json.dumps(thing, default=str)
        return
    if isinstance(thing, list):
        names = [item.get("name") if isinstance(item, dict) else None for item in thing]
        if None in names or len({*names}) < len(names):
            names = [str(number) for number in range(len(thing))]
        else:
            yield f"{place}.*", json.dumps(names)  # the order of the items
        thing = {f"[{name}]": item for name, item in zip(names, thing, strict=True)}
    for key in sorted(thing):
        name = str(key).replace("~", "~0").replace(".", "~1")
        yield from _values(thing[key], f"{place}.{name}" if place else name)
