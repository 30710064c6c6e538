"""Keyed pseudo-random permutation of range(n) with random access and without memory, for any n below 2**62.

It is a generalized Feistel network over Z_a x Z_b (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). a
and b are near the square root of n. Cycle walking handles the fewer than a values of a*b above n. It shuffles well and
is not cryptography. The bits are part of every run's identity: any change here needs a new DATA_PLANE_VERSION.
"""

from math import isqrt

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # splitmix64
_SHIFTS = (np.uint64(30), np.uint64(27))
_HALF = np.uint64(32)

Indices = NDArray[np.int64]


def derive_key(*parts: int | str) -> bytes:
    """A key for each tuple of numbers and words, independent of the key of every other tuple."""
    return blake3("\0".join(f"{type(part).__name__}:{part}" for part in parts).encode()).digest(length=8 * ROUNDS)


class Permutation:
    """The permutation of range(n) for `key` (from `derive_key`)."""

    def __init__(self, n: int, key: bytes) -> None:
        if not 1 <= n < 2**62:
            raise ValueError(f"n must be in 1..2**62, not {n}")
        self.n = n
        self._a = np.uint64(isqrt(n - 1) + 1)
        self._b = np.uint64(-(-n // int(self._a)))
        self._keys = np.frombuffer(key, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: Indices) -> Indices:
        """The image of each of `indices` (int64, any shape, in range(n)), in the same shape."""
        value = self._once(np.asarray(indices, dtype=np.uint64))
        outside = value >= np.uint64(self.n)
        while outside.any():
            value[outside] = self._once(value[outside])
            outside = value >= np.uint64(self.n)
        return value.astype(np.int64)

    def _once(self, value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = np.divmod(value, self._b)  # high in Z_a, low in Z_b
        for number in range(0, ROUNDS, 2):
            high = _add(high, _below(self._a, low ^ self._keys[number]), self._a)
            low = _add(low, _below(self._b, high ^ self._keys[number + 1]), self._b)
        return high * self._b + low


def _below(bound: np.uint64, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of x in range(bound), for a bound up to 2**32: mixed bits, scaled without a division."""
    x = (x ^ (x >> _SHIFTS[0])) * _MIX[0]
    x = (x ^ (x >> _SHIFTS[1])) * _MIX[1]
    return ((x >> _HALF) * bound) >> _HALF


def _add(x: NDArray[np.uint64], y: NDArray[np.uint64], modulus: np.uint64) -> NDArray[np.uint64]:
    total = x + y
    total -= (total >= modulus) * modulus
    return total
