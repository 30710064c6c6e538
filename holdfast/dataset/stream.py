"""Token stream: the tokens of one split of one source as one long sequence over all its shards."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from holdfast.dataset.permutation import Indices
from holdfast.dataset.remote import RemoteShard, fetch
from holdfast.dataset.shards import ShardFile, Tokens

READ_TOKENS = 2**20  # tokens that `documents` processes together
FEW_ROWS = 12  # rows of a shard in a batch below which copying each row costs less than setting up a gather
MAPPED = 32  # shards whose rows are copied together: a batch may touch more shards than may be mapped
ACROSS = -1  # file number of a run of tokens that spans several shards


Files = Sequence[ShardFile | RemoteShard]  # all of one kind


class TokenStream:
    """Reads tokens at any position."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._starts: Indices = np.cumsum([0, *(file.shard.tokens for file in files)], dtype=np.int64)
        self.tokens = int(self._starts[-1])

    def samples(self, context: int) -> int:
        """The number of samples of `context` tokens and their successors. Neighbors share only their end token."""
        return max(0, (self.tokens - 1) // context)

    def locate(self, starts: Indices, length: int) -> tuple[Indices, Indices]:
        """The file (an index of `files`, or ACROSS) and the position in it of each run of `length` tokens."""
        file = np.searchsorted(self._starts, starts, side="right") - 1
        local = starts - self._starts[file]
        return np.where(starts + length <= self._starts[file + 1], file, ACROSS), local

    def gather(self, starts: Indices, length: int) -> NDArray[np.int64]:
        """The runs of `length` tokens at `starts`, verified: int64 [len(starts), length]."""
        file, local = self.locate(starts, length)
        return copy_rows(self.files, file, local, length, lambda row: self.read(int(starts[row]), length))

    def read(self, start: int, length: int) -> Tokens:
        """The `length` tokens from position `start`, verified."""
        parts = []
        stop = start + length
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            file, base = self.files[index], int(self._starts[index])
            end = min(stop, int(self._starts[index + 1]))
            parts.append(file.run(start - base, end - start))
            start, index = end, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents(self, end_of_text: int) -> Iterator[Tokens]:
        """The documents in order, each without its end-of-text token."""
        pending: list[Tokens] = []
        for start in range(0, self.tokens, READ_TOKENS):
            tokens = self.read(start, min(READ_TOKENS, self.tokens - start))
            at = 0
            for end in np.flatnonzero(tokens == end_of_text).tolist():
                pending.append(tokens[at:end])
                yield np.concatenate(pending)
                pending, at = [], end + 1
            pending.append(tokens[at:])

    def verify(self) -> None:
        """Verify every byte. Raises DataError."""
        for file in self.files:
            file.check_all()


def copy_rows(
    files: Files, file: Indices, local: Indices, length: int, across: Callable[[int], Tokens]
) -> NDArray[np.int64]:
    """The runs of `length` tokens at `local` in `files[file]`, verified: int64 [n, length]. `across` returns the
    rows that span several files."""
    touched = sorted(set(file.tolist()) - {ACROSS})
    if touched and isinstance(files[0], RemoteShard):
        return _copy_remote(cast(Sequence[RemoteShard], files), touched, file, local, length, across)
    mapped = cast(Sequence[ShardFile], files)
    if len(touched) <= MAPPED:
        return _copy_mapped(mapped, touched, file, local, length, across)
    out = np.empty((len(file), length), dtype=np.int64)
    for start in range(0, len(touched), MAPPED):
        group = touched[start : start + MAPPED]
        rows = np.flatnonzero(np.isin(file, group))
        out[rows] = _copy_mapped(mapped, group, file[rows], local[rows], length, across)
    for row in np.flatnonzero(file == ACROSS).tolist():
        out[row] = across(row)
    return out


def _copy_mapped(
    files: Sequence[ShardFile],
    touched: list[int],
    file: Indices,
    local: Indices,
    length: int,
    across: Callable[[int], Tokens],
) -> NDArray[np.int64]:
    numbers = file.tolist()
    for index in touched:
        if not files[index].checked:
            files[index].check_rows(local[file == index], length)
    if len(numbers) < FEW_ROWS * len(touched) or ACROSS in numbers:
        tokens = {index: files[index].tokens() for index in touched}
        runs = [
            tokens[index][start : start + length] if index != ACROSS else across(row)
            for row, (index, start) in enumerate(zip(numbers, local.tolist(), strict=True))
        ]
        return np.concatenate(runs).astype(np.int64).reshape(len(runs), length)
    out = np.empty((len(numbers), length), dtype=np.int64)
    for index in touched:
        rows = slice(None) if len(touched) == 1 else np.flatnonzero(file == index)
        out[rows] = files[index].windows(length)[local[rows]]
    return out


def _copy_remote(
    files: Sequence[RemoteShard],
    touched: list[int],
    file: Indices,
    local: Indices,
    length: int,
    across: Callable[[int], Tokens],
) -> NDArray[np.int64]:
    pieces = [(files[index], piece) for index in touched for piece in files[index].pieces(local[file == index], length)]
    fetched = fetch(pieces)
    out = np.empty((len(file), length), dtype=np.int64)
    for row, (index, start) in enumerate(zip(file.tolist(), local.tolist(), strict=True)):
        out[row] = across(row) if index == ACROSS else files[index].run(start, length, fetched)
    return out
