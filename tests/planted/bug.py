"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """`old` stands exactly once in `file` and becomes `new`; then one of `tests` must fail, because of `why`."""

    file: str
    old: str
    new: str
    tests: str  # paths for pytest, by spaces
    why: str
