"""The tokens of one split of one source as one long sequence, whatever shards it lies in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from components.dataset.permutation import Indices
from components.dataset.shards import ShardFile, Tokens

READ_TOKENS = 2**20  # how much `documents` looks at at once


class TokenStream:
    """Reads tokens at any position. `fetch` is called with the shards that are about to be touched."""

    def __init__(self, files: Sequence[ShardFile], fetch: Callable[[Sequence[ShardFile]], None] | None = None) -> None:
        self._files = list(files)
        self._fetch = fetch
        self._starts: Indices = np.cumsum([0, *(file.shard.tokens for file in files)], dtype=np.int64)
        self.tokens = int(self._starts[-1])

    def samples(self, context: int) -> int:
        """How many samples of `context` tokens and their successors there are. They share their end tokens only."""
        return max(0, (self.tokens - 1) // context)

    def gather(self, starts: Indices, length: int, out: NDArray[np.int64], rows: Indices) -> None:
        """Fill `out[rows[j]]` with the `length` tokens from position `starts[j]`."""
        first = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[first + 1]
        touched = np.unique(first)
        if self._fetch is not None:
            self._fetch([self._files[index] for index in touched.tolist()])
        if len(touched) == 1 and inside.all():
            self._gather_one(int(touched[0]), starts, length, out, rows)
            return
        for index in touched.tolist():
            chosen = (first == index) & inside
            if chosen.any():
                self._gather_one(index, starts[chosen], length, out, rows[chosen])
        for row, start in zip(rows[~inside].tolist(), starts[~inside].tolist(), strict=True):
            out[row] = self.read(start, start + length)

    def _gather_one(self, index: int, starts: Indices, length: int, out: NDArray[np.int64], rows: Indices) -> None:
        file = self._files[index]
        local = starts - self._starts[index]
        file.check_rows(local, length)
        windows = np.lib.stride_tricks.sliding_window_view(file.tokens(), length)
        if len(rows) == len(out) and len(rows) and rows[0] == 0 and rows[-1] == len(out) - 1:
            out[:] = windows[local]  # rows are ascending: all of them, in order
        else:
            out[rows] = windows[local]

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens in [start, stop), checked."""
        parts = []
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            file, base = self._files[index], int(self._starts[index])
            end = min(stop, int(self._starts[index + 1]))
            if self._fetch is not None:
                self._fetch([file])
            file.check(start - base, end - base - 1)
            parts.append(file.tokens()[start - base : end - base])
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents(self, end_of_text: int) -> Iterator[Tokens]:
        """The documents in order, each without its end-of-text token."""
        pending: list[Tokens] = []
        for start in range(0, self.tokens, READ_TOKENS):
            tokens = self.read(start, min(self.tokens, start + READ_TOKENS))
            at = 0
            for end in np.flatnonzero(tokens == end_of_text).tolist():
                pending.append(tokens[at:end])
                yield np.concatenate(pending)
                pending, at = [], end + 1
            pending.append(tokens[at:])

    def verify(self) -> None:
        """Check every byte. Raises DataError."""
        for file in self._files:
            file.check_all()
