"""Order of samples: the sample at each place of the endless training sequence, as a pure function of (seed, place).

Without weights the samples of all sources are one set, and every epoch is a new permutation of it. Each sample occurs
once per epoch. With weights the sequence is divided into blocks. A block holds exactly `quota` samples of each source,
in an order that is shuffled for each block. Each source has separate epochs, with each of its samples once per epoch.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np

from holdfast.dataset.permutation import Indices, Permutation, derive_key

BLOCK = 8192  # largest block: shares that no smaller block represents exactly are rounded to 1/8192


# From the number of samples, the seed and their purpose to the order of an endless sequence of epochs.
MakeShuffle = Callable[[int, int, str], Callable[[Indices], Indices]]


class UniformOrder:
    """All samples of all sources, once per epoch."""

    def __init__(self, counts: Sequence[int], seed: int, shuffle: MakeShuffle | None = None) -> None:
        self._starts = np.cumsum([0, *counts])
        self._shuffle = (shuffle or _EpochShuffle)(int(self._starts[-1]), seed, "samples")

    def __call__(self, places: Indices) -> tuple[Indices, Indices]:
        """The source and the sample within it at each of `places` (int64 [n]). Two int64 [n]."""
        sample = self._shuffle(places)
        if len(self._starts) == 2:
            return np.zeros_like(sample), sample
        source = np.searchsorted(self._starts, sample, side="right") - 1
        return source, sample - self._starts[source]


class WeightedOrder:
    """Sources by weight, each with separate epochs. `quotas` is the exact share of each source in every block.

    `rows` is the number of sequences that are mixed separately. Place p belongs to sequence p modulo `rows`. With the
    rows of the global batch, each row draws from separate blocks.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: MakeShuffle | None = None,
        rows: int = 1,
    ) -> None:
        self.quotas = block_quotas(weights)
        self.block = sum(self.quotas)
        self._quotas = np.array(self.quotas)
        self._starts = np.cumsum([0, *self.quotas])
        self._seed, self._rows = seed, rows
        self._sources = [
            (shuffle or _EpochShuffle)(count, seed, f"source {index}") for index, count in enumerate(counts)
        ]

    def __call__(self, places: Indices) -> tuple[Indices, Indices]:
        """The source and the sample within it at each of `places` (int64 [n]). Two int64 [n]."""
        position, row = np.divmod(places, self._rows)
        block, offset = np.divmod(position, self.block)
        offset = (offset + row * (self.block // self._rows | 1)) % self.block  # rows alternate between the sources
        source, ordinal = np.empty_like(places), np.empty_like(places)
        for number in np.unique(block).tolist():
            chosen = block == number
            sources, ordinals = self._layout(number)
            source[chosen], ordinal[chosen] = sources[offset[chosen]], ordinals[offset[chosen]]
        ordinal = ordinal * self._rows + row
        sample = np.empty_like(ordinal)
        for index in np.unique(source).tolist():
            chosen = source == index
            sample[chosen] = self._sources[index](ordinal[chosen])
        return source, sample

    def _layout(self, block: int) -> tuple[Indices, Indices]:
        """The source of every place of a block, and the number of earlier samples of that source since place 0."""
        slots = Permutation(self.block, derive_key(self._seed, "block", block))(np.arange(self.block))
        source = np.searchsorted(self._starts, slots, side="right") - 1
        ordinal = np.empty_like(source)
        ordinal[np.argsort(source, kind="stable")] = np.arange(self.block)
        return source, ordinal - self._starts[source] + block * self._quotas[source]


def block_quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in a block. They are exact if the weights are fractions with a common denominator up to
    8192. Otherwise they are rounded to 1/8192 by largest remainder. Each source has at least one."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(fractions)
    shares = [fraction / total for fraction in fractions]
    denominator = lcm(*(share.denominator for share in shares))
    if denominator <= BLOCK:
        block = denominator * max(1, BLOCK // 2 // denominator)
        return tuple(int(share * block) for share in shares)
    quotas = [max(1, int(share * BLOCK)) for share in shares]
    remainders = sorted(
        range(len(shares)), key=lambda index: (int(shares[index] * BLOCK) - shares[index] * BLOCK, index)
    )
    for index in remainders[: max(0, BLOCK - sum(quotas))]:
        quotas[index] += 1
    return tuple(quotas)


class _EpochShuffle:
    """0, 1, 2, ... to range(count), in a new random order for each epoch of `count` places."""

    def __init__(self, count: int, seed: int, purpose: str) -> None:
        self._count = count

        @lru_cache(maxsize=64)
        def permutation(epoch: int) -> Permutation:
            return Permutation(count, derive_key(seed, purpose, epoch))

        self._permutation = permutation

    def __call__(self, places: Indices) -> Indices:
        epoch, offset = np.divmod(places, self._count)
        first, last = int(epoch.min()), int(epoch.max())
        if first == last:
            return self._permutation(first)(offset)
        result = np.empty_like(offset)
        for number in np.unique(epoch).tolist():
            chosen = epoch == number
            result[chosen] = self._permutation(number)(offset[chosen])
        return result
