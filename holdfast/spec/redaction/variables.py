"""Secrets among the variables of a process, which are removed wherever their values occur."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from holdfast.spec.redaction import patterns
from holdfast.spec.redaction.names import names_secret

MIN_VALUE = 6  # minimum length of a variable's value that is removed wherever it occurs


def secret_values(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The values of variables with the name of a secret, and the passwords in variables with a URL, longest first."""
    if environment is None:
        return _values_of_process()
    values: set[str] = set()
    for name, value in environment.items():
        if names_secret(name):
            values.update(_worth_hiding(value))
        elif "://" in value and (user := patterns.USER.search(value)):
            values.update(_worth_hiding(user[0].rstrip("@").partition(":")[2]))
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


_known: tuple[object, tuple[str, ...]] = (None, ())


def _values_of_process() -> tuple[str, ...]:
    """`secret_values` of this process, computed again only when a variable changes. Each text of each event needs them,
    and `os.environ` decodes all of its names and values at every read."""
    global _known  # noqa: PLW0603 - one tuple, replaced as a whole, so threads need no lock
    raw = vars(os.environ).get("_data")  # the undecoded variables: a dictionary that is compared in a microsecond
    now = dict(os.environ if raw is None else raw)
    before, values = _known
    if before != now:
        values = secret_values(dict(os.environ))
        _known = now, values
    return values


def _worth_hiding(value: str) -> Iterator[str]:
    value = value.strip()
    if len(value) >= MIN_VALUE and not patterns.PLACEHOLDERS.fullmatch(value.lower()) and not value.startswith("/"):
        yield value
        for other in (quote(value, safe=""), value.replace("\\", "\\\\").replace('"', '\\"')):
            if other != value:
                yield other
