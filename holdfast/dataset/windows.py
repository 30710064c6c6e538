"""Windowed shuffle: an order of samples that keeps a node's reads local, for corpora larger than any node.

The stream is divided into blocks of consecutive samples, and the blocks are shuffled over the whole corpus. Every row
of the global batch has a separate sequence of blocks. It reads a window of some blocks at a time and takes the samples
of a window in random order. A node holds some rows of every batch, so it reads almost only the blocks of its rows. A
batch still has samples from as many places of the corpus as it has rows. The order is a pure function of (seed, place),
like the global shuffle. It needs no memory and seeks freely. Each sample occurs once per epoch, and the batches are the
same at any world size.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from holdfast.dataset.permutation import Indices, Permutation, derive_key


class WindowShuffle:
    """0, 1, 2, ... to range(count), in another order for each epoch of `count` places.

    - `rows`: the number of sequences of blocks. Place p belongs to sequence p modulo `rows`, shifted differently in
      each epoch.
    - `block`: samples per block.
    - `window`: blocks whose samples are mixed.

    An epoch consists of (windows) x (places of a window) x (rows), and then the rest. The rest is the fewer than `rows`
    blocks that cannot be divided evenly, and the samples after the last whole block, in one global shuffle.
    """

    def __init__(self, count: int, seed: int, purpose: str, *, rows: int, block: int, window: int) -> None:
        self._count, self._rows, self._block, self._window = count, rows, block, window
        self._blocks = count // block
        self._each = self._blocks // rows  # blocks per row
        self._dealt = self._each * rows * block  # samples in them

        @lru_cache(maxsize=64)
        def permutation(size: int, *about: int | str) -> Permutation:
            return Permutation(size, derive_key(seed, purpose, *about))

        self._permutation = permutation

    def __call__(self, places: Indices) -> Indices:
        """The sample at each of `places` (int64 [n]). Int64 [n]."""
        epoch, within = np.divmod(places, self._count)
        result = np.empty_like(within)
        for number in np.unique(epoch).tolist():
            chosen = epoch == number
            result[chosen] = self._epoch(number, within[chosen])
        return result

    def _epoch(self, epoch: int, within: Indices) -> Indices:
        sample = np.empty_like(within)
        rest = within >= self._dealt
        if rest.any():
            sample[rest] = self._of_rest(epoch, within[rest] - self._dealt)
        position, row = np.divmod(within, self._rows)
        window = position // (self._window * self._block)
        for number in np.unique(window[~rest]).tolist():
            chosen = ~rest & (window == number)
            sample[chosen] = self._of_window(epoch, number, row[chosen], position[chosen])
        return sample

    def _of_window(self, epoch: int, window: int, row: Indices, position: Indices) -> Indices:
        """The samples at `position` of the sequences `row`, all in the same window."""
        first = window * self._window
        size = min(self._window, self._each - first) * self._block
        mixed = self._permutation(size, "window", epoch, window)(position - first * self._block)
        mixed = (mixed + row * (size // self._rows | 1)) % size  # so that rows are not synchronized
        turn, inside = np.divmod(mixed, self._block)
        return self._shuffled(epoch, (first + turn) * self._rows + row) * self._block + inside

    def _of_rest(self, epoch: int, place: Indices) -> Indices:
        index = self._permutation(self._count - self._dealt, "rest", epoch)(place) + self._dealt
        block, inside = np.divmod(index, self._block)
        whole = block < self._blocks
        block[whole] = self._shuffled(epoch, block[whole])
        return block * self._block + inside

    def _shuffled(self, epoch: int, block: Indices) -> Indices:
        return self._permutation(self._blocks, "blocks", epoch)(block) if self._blocks else block
