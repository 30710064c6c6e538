"""Shard files: tokens, followed by a digest of each block, read memory-mapped and verified.

A file has the tokens (little-endian, uint16 or uint32), then one 16-byte blake3 digest for each 64 KiB block. The
manifest holds the digest of these digests. So a wrong size shows when the dataset is opened, and altered bytes show
when their block is first read. Neither costs more for a larger corpus.
"""

from __future__ import annotations

import resource
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.dataset.manifest import DtypeName, Shard
from holdfast.spec.errors import DataError

MOST_OPEN = 512  # files mapped at a time, or a quarter of the descriptors that this process may have
BLOCK_BYTES = 64 * 1024
DIGEST_BYTES = 16
DTYPES: dict[DtypeName, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

Tokens = NDArray[np.unsignedinteger]


def dtype_for(vocabulary: int) -> DtypeName:
    """The narrowest type for every token of a vocabulary."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def token_bytes(shard: Shard) -> int:
    """Size of the tokens of a shard, in bytes."""
    return shard.tokens * DTYPES[shard.dtype].itemsize


def file_bytes(shard: Shard) -> int:
    """Size of the whole file of a shard, in bytes."""
    return token_bytes(shard) + DIGEST_BYTES * -(-token_bytes(shard) // BLOCK_BYTES)


def block_digests(data: bytes | bytearray | memoryview) -> bytes:
    """The concatenated digests of the blocks of `data`, as at the end of a shard file."""
    view = memoryview(data).cast("B")
    blocks = (view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES))
    return b"".join(blake3(block).digest(length=DIGEST_BYTES) for block in blocks)


def shard_digest(digests: bytes) -> str:
    """The manifest's digest of a shard, from the digests of its blocks."""
    return blake3(digests).hexdigest()


class OpenFiles:
    """The currently mapped shard files, at most `limit`. A map needs a file descriptor and an entry in the kernel's
    table of maps. A process has few of both (1,024 and 65,530 are common). The oldest map is closed first."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit or max(16, min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._open: deque[ShardFile] = deque()
        self._lock = threading.Lock()

    def add(self, file: ShardFile) -> None:
        """Register a mapped file, and close the oldest maps beyond the limit."""
        with self._lock:
            self._open.append(file)
            while len(self._open) > self.limit:
                self._open.popleft().close()


class _Map(NamedTuple):
    """A file in memory. It is unmapped with the last array that refers to it."""

    tokens: Tokens
    raw: memoryview  # the same tokens, as bytes
    digests: bytes  # of the blocks


class ShardFile:
    """One shard in a folder, mapped into memory on first use. A block is verified on first use."""

    def __init__(self, shard: Shard, label: str, path: Path, opened: OpenFiles) -> None:
        self.shard = shard
        self.label = label
        self._path = path
        self._opened = opened
        self._map: _Map | None = None
        self._windows: Tokens | None = None
        self._unchecked: NDArray[np.bool_] | None = None  # blocks; kept after the map is closed
        self._left = 1  # number of unchecked blocks; unknown before the first map

    @property
    def checked(self) -> bool:
        """Whether every block was verified."""
        return not self._left

    def close(self) -> None:
        """Drop the map. The next use maps the file again."""
        self._map = self._windows = None

    def tokens(self) -> Tokens:
        """All tokens of the shard, not verified. Call `check` for the used part."""
        return self._mapped().tokens

    def run(self, start: int, length: int) -> Tokens:
        """The `length` tokens from `start`, verified."""
        if self._left:
            self.check(start, start + length - 1)
        return self.tokens()[start : start + length]

    def windows(self, length: int) -> Tokens:
        """Every run of `length` tokens, not verified: [tokens - length + 1, length], a view."""
        windows = self._windows
        if windows is None or windows.shape[1] != length:
            windows = self._windows = np.lib.stride_tricks.sliding_window_view(self.tokens(), length)
        return windows

    def check(self, first: int, last: int) -> None:
        """Verify the blocks that hold the tokens first..last (inclusive), once. Raises DataError."""
        width = DTYPES[self.shard.dtype].itemsize
        self._check_blocks(np.arange(first * width // BLOCK_BYTES, last * width // BLOCK_BYTES + 1))

    def check_rows(self, starts: NDArray[np.int64], length: int) -> None:
        """Verify the blocks under the rows of `length` tokens at `starts`, once. Raises DataError."""
        width = DTYPES[self.shard.dtype].itemsize
        first = starts * width // BLOCK_BYTES
        last = (starts + length - 1) * width // BLOCK_BYTES
        steps = np.arange(int((last - first).max()) + 1)
        self._check_blocks(np.unique(np.minimum(first[:, None] + steps, last[:, None])))

    def check_all(self) -> None:
        """Verify every block. Raises DataError."""
        self.check(0, self.shard.tokens - 1)

    def _check_blocks(self, blocks: NDArray[np.int64]) -> None:
        mapped = self._mapped()
        assert self._unchecked is not None
        for block in blocks[self._unchecked[blocks]].tolist():
            if not intact(mapped.raw[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES], mapped.digests, block):
                raise damaged(self.label, f"block {block} (64 KiB) does not have the digest that was written")
            self._unchecked[block] = False
        self._left = int(np.count_nonzero(self._unchecked))  # counted, not decremented: two threads may be here

    def _mapped(self) -> _Map:
        mapped = self._map
        if mapped is None:
            mapped = self._map = self._open()
            self._opened.add(self)
        return mapped

    def _open(self) -> _Map:
        size, expected = self._path.stat().st_size, file_bytes(self.shard)
        if size != expected:
            raise damaged(self.label, f"has {size} bytes instead of {expected}")
        mapped = np.memmap(self._path, dtype=np.uint8, mode="r")
        end = token_bytes(self.shard)
        digests = b""
        if self._left:
            digests = mapped[end:].tobytes()
            if shard_digest(digests) != self.shard.digest:
                raise damaged(self.label, "its list of block digests is not the one that dataset.json names")
        if self._unchecked is None:
            self._left = len(digests) // DIGEST_BYTES
            self._unchecked = np.ones(self._left, dtype=bool)
        # A plain array over the map: every slice of an np.memmap object costs a slow __array_finalize__.
        plain = np.asarray(mapped[:end])
        return _Map(plain.view(DTYPES[self.shard.dtype]), plain.data, digests)


def intact(block: bytes | memoryview, digests: bytes, number: int) -> bool:
    """Whether the bytes of block `number` have its digest in the list."""
    return blake3(block).digest(length=DIGEST_BYTES) == digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


def damaged(label: str, what: str) -> DataError:
    """The error for a damaged shard."""
    return DataError(f"{label}: {what}; delete it and run preprocess again, which rebuilds it")
