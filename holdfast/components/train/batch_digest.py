"""Digest of the samples used in each step, stored in the step's history row.

It is made of the tokens as they are handed to the engines, not of the plan that says which they should be: whoever
reads the history can compare the two. Neither the order of the samples nor how ranks divide them is part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.runtime.gang import Gang

_MODULUS = 2**64


def samples_digest(rows: NDArray[np.int64]) -> int:
    """The sum over the rows (samples × tokens) of 64 bits of each one's BLAKE3, modulo 2^64."""
    whole = np.ascontiguousarray(rows, dtype="<i8").view(np.uint8)
    return sum(int.from_bytes(blake3(row).digest(8), "little") for row in whole) % _MODULUS


class BatchDigest:
    """Notes what this rank is fed, and tells what all were."""

    def __init__(self, gang: Gang, *, speaks: bool) -> None:
        """`speaks`: whether this rank, of all those that are fed the same rows, is the one that counts."""
        self._gang, self._speaks = gang, speaks
        self._own: dict[int, int] = {}  # of each step (done) that was not told yet

    def record(self, batches: Iterable[tuple[int, NDArray[np.int64]]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The batches, as they are fed."""
        for step, rows in batches:
            self._own[step + 1] = samples_digest(rows) if self._speaks else 0
            yield step, rows

    def flush(self) -> dict[int, str]:
        """The digest of each step since the last call, in 16 hexadecimal digits. A collective call, at one step."""
        parts = self._gang.all_gather(self._own, dict[int, int])
        self._own = {}
        return {step: f"{sum(part[step] for part in parts) % _MODULUS:016x}" for step in parts[0]}
