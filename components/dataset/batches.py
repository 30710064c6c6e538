"""The batch of a training step: a pure function of (dataset, seed, step). There is no loader state to save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from components.dataset.mixture import UniformOrder, WeightedOrder
from components.dataset.permutation import Indices
from components.dataset.stream import TokenStream

LOOKAHEAD = 4096  # places resolved at once: small batches then share the cost of the permutation


class Batches:
    """Training batches by step. Sample i of a source is its tokens i*context to i*context + context, both included."""

    def __init__(
        self, streams: Sequence[TokenStream], order: UniformOrder | WeightedOrder, context: int, global_batch: int
    ) -> None:
        self._streams = streams
        self._order = order
        self.context = context
        self.global_batch = global_batch
        self._window: tuple[int, Indices, Indices] = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    @property
    def samples(self) -> int:
        """Samples of an epoch, over all sources."""
        return sum(stream.samples(self.context) for stream in self._streams)

    def batch(self, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        """The rows `rows` of the global batch of `step` (from 0): int64 [rows, context + 1], where [:, :-1] are the
        inputs and [:, 1:] the targets. Reads nothing but these rows. Raises DataError when a shard is damaged."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        places = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)[rows]
        out = np.empty((len(places), self.context + 1), dtype=np.int64)
        if not len(places):
            return out
        source, sample = self._resolve(places)
        every_row = np.arange(len(places))
        if len(self._streams) == 1:
            self._streams[0].gather(sample * self.context, self.context + 1, out, every_row)
            return out
        for index in np.unique(source).tolist():
            chosen = source == index
            self._streams[index].gather(sample[chosen] * self.context, self.context + 1, out, every_row[chosen])
        return out

    def _resolve(self, places: Indices) -> tuple[Indices, Indices]:
        """Source and sample of each place. What is kept between calls is a pure function of the places: a cache."""
        first, last = int(places.min()), int(places.max())
        number = first // LOOKAHEAD
        if last // LOOKAHEAD != number:
            return self._order(places)
        if self._window[0] != number:
            window = np.arange(number * LOOKAHEAD, (number + 1) * LOOKAHEAD, dtype=np.int64)
            self._window = (number, *self._order(window))
        _, source, sample = self._window
        local = places - number * LOOKAHEAD
        return source[local], sample[local]
