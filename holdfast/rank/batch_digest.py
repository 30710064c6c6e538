"""Digest of the samples used in each step, stored in the step's history row.

It covers the tokens handed to the engines, not the planned order, so readers of the history can compare the two. It
depends neither on the order of the samples nor on their division among ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.collectives import Gang

_MODULUS = 2**64


def samples_digest(rows: NDArray[np.int64]) -> int:
    """The sum over the rows (samples × tokens, and their scores) of 64 bits of each row's BLAKE3, modulo 2^64."""
    row_bytes: NDArray[np.uint8] = np.ascontiguousarray(rows, dtype="<i8").reshape(len(rows), -1).view(np.uint8)
    return sum(int.from_bytes(blake3(row.data).digest(8), "little") for row in row_bytes) % _MODULUS


class BatchDigest:
    """Digests this rank's batches, and sums the digests over all ranks."""

    def __init__(self, gang: Gang, *, speaks: bool) -> None:
        """`speaks` is true on one of the ranks that receive the same rows. Only that rank counts."""
        self._gang, self._speaks = gang, speaks
        self._own: dict[int, int] = {}  # of each finished step since the last flush

    def record(self, batches: Iterable[tuple[int, NDArray[np.int64]]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Digest the batches as they pass."""
        for step, rows in batches:
            self._own[step + 1] = samples_digest(rows) if self._speaks else 0
            yield step, rows

    def flush(self) -> dict[int, str]:
        """The digest of each step since the last call, in 16 hexadecimal digits. A collective call at the same step
        on all ranks."""
        parts = self._gang.all_gather(self._own, dict[int, int])
        self._own = {}
        return {step: f"{sum(part[step] for part in parts) % _MODULUS:016x}" for step in parts[0]}
