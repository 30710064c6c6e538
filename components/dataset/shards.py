"""The shard file: tokens, then a digest of each block of them. Reading it memory-mapped, and never trusting it blindly.

A file is the tokens (little-endian, uint16 or uint32) followed by one 16-byte blake3 digest for each 64 KiB block; the
manifest holds the digest of these digests. So a wrong size shows when the dataset is opened, and altered bytes show
when their block is first touched: neither costs more when the corpus grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.components.dataset.manifest import DtypeName, Shard
from holdfast.components.spec.errors import DataError

FETCHES = 8  # files fetched at once
BLOCK_BYTES = 64 * 1024
DIGEST_BYTES = 16
DTYPES: dict[DtypeName, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Tokens = NDArray[np.unsignedinteger]


def dtype_for(vocabulary: int) -> DtypeName:
    """The narrowest type that holds every token of a vocabulary."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def token_bytes(shard: Shard) -> int:
    """Size of the tokens of a shard, in bytes."""
    return shard.tokens * DTYPES[shard.dtype].itemsize


def file_bytes(shard: Shard) -> int:
    """Size of the whole file of a shard, in bytes."""
    return token_bytes(shard) + DIGEST_BYTES * -(-token_bytes(shard) // BLOCK_BYTES)


def block_digests(data: bytes | bytearray | memoryview) -> bytes:
    """The digests of the blocks of `data`, one after another: what stands at the end of a shard file."""
    view = memoryview(data).cast("B")
    blocks = (view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES))
    return b"".join(blake3(block).digest(length=DIGEST_BYTES) for block in blocks)


def shard_digest(digests: bytes) -> str:
    """What the manifest holds for a shard, from the digests of its blocks."""
    return blake3(digests).hexdigest()


def fetch_files(files: Sequence[ShardFile]) -> None:
    """Fetch the files that are not here yet, several at once. Files that are here are mapped when they are touched."""
    missing = [file for file in files if file.remote and not file.mapped]
    if len(missing) > 1:
        with ThreadPoolExecutor(FETCHES) as pool:
            list(pool.map(ShardFile.tokens, missing))


class ShardFile:
    """One shard, mapped into memory when it is first touched; a block is checked when it is first touched.

    `locate` gives the file and may fetch it first. `refetch`, if given, replaces a damaged local copy by a fresh one.
    """

    def __init__(
        self, shard: Shard, label: str, locate: Callable[[], Path], refetch: Callable[[], Path] | None = None
    ) -> None:
        self.shard = shard
        self.label = label
        self._locate = locate
        self._refetch = refetch
        self._tokens: Tokens | None = None
        self._windows: Tokens | None = None
        self._raw: memoryview = memoryview(b"")
        self._digests = b""
        self._unchecked: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._left = 0

    @property
    def remote(self) -> bool:
        """Whether the file lies elsewhere and is read from a local copy."""
        return self._refetch is not None

    @property
    def mapped(self) -> bool:
        """Whether the file has been touched already."""
        return self._tokens is not None

    @property
    def checked(self) -> bool:
        """Whether the file is mapped and every block of it has been checked."""
        return self._tokens is not None and not self._left

    def tokens(self) -> Tokens:
        """All tokens of the shard, unchecked. Call `check` for the part that is used."""
        if self._tokens is None:
            return self._map(self._locate())
        return self._tokens

    def run(self, start: int, length: int) -> Tokens:
        """The `length` tokens from `start`, checked."""
        if self._left or self._tokens is None:
            self.check(start, start + length - 1)
        tokens = self.tokens() if self._tokens is None else self._tokens
        return tokens[start : start + length]

    def windows(self, length: int) -> Tokens:
        """Every run of `length` tokens, unchecked: [tokens - length + 1, length], a view."""
        tokens = self.tokens()
        windows = self._windows
        if windows is None or windows.shape[1] != length:
            windows = self._windows = np.lib.stride_tricks.sliding_window_view(tokens, length)
        return windows

    def check(self, first: int, last: int) -> None:
        """Verify the blocks that hold the tokens first..last (inclusive), once. Raises DataError."""
        self.tokens()
        if not self._left:
            return
        width = DTYPES[self.shard.dtype].itemsize
        span = slice(first * width // BLOCK_BYTES, last * width // BLOCK_BYTES + 1)
        self._check_blocks(np.arange(span.start, span.stop))

    def check_rows(self, starts: NDArray[np.int64], length: int) -> None:
        """Verify the blocks under the rows of `length` tokens at `starts`, once. Raises DataError."""
        self.tokens()
        if not self._left:
            return
        width = DTYPES[self.shard.dtype].itemsize
        first = starts * width // BLOCK_BYTES
        last = (starts + length - 1) * width // BLOCK_BYTES
        steps = np.arange(int((last - first).max()) + 1)
        self._check_blocks(np.unique(np.minimum(first[:, None] + steps, last[:, None])))

    def check_all(self) -> None:
        """Verify every block. Raises DataError."""
        self.check(0, self.shard.tokens - 1)

    def _check_blocks(self, blocks: NDArray[np.int64]) -> None:
        while (unchecked := blocks[self._unchecked[blocks]]).size:  # once more after a refetch: that is another file
            for block in unchecked.tolist():
                self._check_block(block)

    def _check_block(self, block: int) -> None:
        if not self._intact(block):
            if self._refetch is None:
                raise self._damaged(f"block {block} (64 KiB) does not have the digest that was written")
            self._map(self._refetch())
            if not self._intact(block):
                raise self._damaged(f"block {block} (64 KiB) does not have the digest that was written")
        self._unchecked[block] = False
        self._left = int(np.count_nonzero(self._unchecked))  # counted, not decremented: two threads may be here

    def _intact(self, block: int) -> bool:
        data = self._raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        expected = self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        return blake3(data).digest(length=DIGEST_BYTES) == expected

    def _map(self, path: Path) -> Tokens:
        size, expected = path.stat().st_size, file_bytes(self.shard)
        if size != expected:
            raise self._damaged(f"has {size} bytes instead of {expected}")
        whole = np.memmap(path, dtype=np.uint8, mode="r")
        end = token_bytes(self.shard)
        digests = whole[end:].tobytes()
        if shard_digest(digests) != self.shard.digest:
            raise self._damaged("its list of block digests is not the one that dataset.json names")
        self._digests = digests
        # A plain array over the map: every slice of an np.memmap object costs a slow __array_finalize__.
        plain = np.asarray(whole[:end])
        self._raw = plain.data
        self._left = len(digests) // DIGEST_BYTES
        self._unchecked = np.ones(self._left, dtype=bool)
        tokens: Tokens = plain.view(DTYPES[self.shard.dtype])
        self._tokens = tokens
        self._windows = None
        return tokens

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{self.label}: {what}; delete it and run preprocess again, which rebuilds it")
