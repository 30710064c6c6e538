"""Shards in a bucket: read by ranges of blocks, never as a whole, through a cache on the local disk.

Only the pieces that rows need are fetched, once for all processes of a machine while the cache has space. No byte is
used before its block's digest was compared. A piece damaged on the disk is fetched again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from holdfast.dataset.cache import BlockCache
from holdfast.dataset.manifest import Shard
from holdfast.dataset.shards import (
    BLOCK_BYTES,
    DTYPES,
    Tokens,
    damaged,
    file_bytes,
    intact,
    shard_digest,
    token_bytes,
)
from holdfast.store import Store

PIECE_BLOCKS = 4  # blocks per request: 256 KiB
PIECE_BYTES = PIECE_BLOCKS * BLOCK_BYTES
FETCHES = 8  # concurrent requests
DIGESTS_BYTES = 32 * 2**20  # lists of block digests kept in memory: those of 128 GiB of tokens

Piece = tuple["RemoteShard", int]
Fetched = Mapping[Piece, bytes]


class Bucket:
    """The location of a dataset's shards, their cache on this disk, and the loaded digests."""

    def __init__(self, store: Store, cache: BlockCache) -> None:
        self.store, self.cache = store, cache
        self._digests: OrderedDict[RemoteShard, bytes] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def digests(self, shard: RemoteShard) -> bytes:
        """The digests of the shard's blocks. Raises DataError."""
        with self._lock:
            if shard in self._digests:
                self._digests.move_to_end(shard)
                return self._digests[shard]
        data = shard.read_digests()
        with self._lock:
            if shard not in self._digests:
                self._digests[shard] = data
                self._held += len(data)
            while self._held > DIGESTS_BYTES and len(self._digests) > 1:
                self._held -= len(self._digests.popitem(last=False)[1])
        return data


class RemoteShard:
    """One shard in a bucket. `key` is its name there, `name` its name in the cache."""

    def __init__(self, shard: Shard, bucket: Bucket, key: str, name: str) -> None:
        self.shard = shard
        self.label = f"{bucket.store.url}/{key}"
        self._bucket, self._key, self._name = bucket, key, name
        self._width = DTYPES[shard.dtype].itemsize

    def run(self, start: int, length: int, fetched: Fetched | None = None) -> Tokens:
        """The `length` tokens from `start`, verified. Raises DataError."""
        first, stop = start * self._width, (start + length) * self._width
        low, high = first // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        pieces = range(low // PIECE_BLOCKS, -(-high // PIECE_BLOCKS))
        if fetched is None:
            fetched = fetch([(self, piece) for piece in pieces])
        blocks = b"".join(self._blocks(piece, low, high, fetched) for piece in pieces)
        at = first - low * BLOCK_BYTES
        return np.frombuffer(blocks, dtype=DTYPES[self.shard.dtype], count=length, offset=at)

    def pieces(self, starts: NDArray[np.int64], length: int) -> set[int]:
        """The numbers of the pieces that contain the runs of `length` tokens at `starts`."""
        first = starts * self._width // PIECE_BYTES
        last = ((starts + length) * self._width - 1) // PIECE_BYTES
        steps = np.arange(int((last - first).max()) + 1)
        return set(np.minimum(first[:, None] + steps, last[:, None]).ravel().tolist())

    def check_all(self) -> None:
        """Verify every block. Raises DataError."""
        for piece in range(-(-token_bytes(self.shard) // PIECE_BYTES)):
            self._blocks(piece, 0, 2**62, {})

    def on_disk(self, piece: int) -> bool:
        """Whether a piece is in the cache."""
        return self._bucket.cache.has(f"{self._name}/{piece}")

    def fetch(self, piece: int) -> bytes:
        """A whole piece, verified: from the store, unless another process was faster. Raises DataError."""
        name, cache = f"{self._name}/{piece}", self._bucket.cache
        digests = self._bucket.digests(self)  # before the lock: a process never holds two
        first = piece * PIECE_BLOCKS
        start = first * BLOCK_BYTES
        length = min(PIECE_BYTES, token_bytes(self.shard) - start)
        with cache.fetching(name):
            data = cache.read(name, 0, length)
            if data is not None and _wrong(data, first, digests) is None:
                return data
            for _ in range(2):  # a byte altered in transit differs from one altered in the store
                data = self._bucket.store.get(self._key, start, length)
                block = _wrong(data, first, digests)
                if block is None:
                    cache.write(name, data)
                    return data
        raise damaged(self.label, f"block {block} (64 KiB) does not have the digest that was written")

    def read_digests(self) -> bytes:
        """The digests of all blocks, verified. Raises DataError."""
        name, cache = f"{self._name}/digests", self._bucket.cache
        start = token_bytes(self.shard)
        with cache.fetching(name):
            data = cache.read(name)
            if data is not None and shard_digest(data) == self.shard.digest:
                return data
            data = self._bucket.store.get(self._key, start, file_bytes(self.shard) - start)
            if shard_digest(data) != self.shard.digest:
                raise damaged(self.label, "its list of block digests is not the one that dataset.json names")
            cache.write(name, data)
            return data

    def _blocks(self, piece: int, low: int, high: int, fetched: Fetched) -> bytes:
        """The blocks of a piece within [low, high), verified."""
        base = piece * PIECE_BLOCKS
        first, stop = max(low, base), min(high, base + PIECE_BLOCKS)
        start = (first - base) * BLOCK_BYTES
        end = min((stop - base) * BLOCK_BYTES, token_bytes(self.shard) - base * BLOCK_BYTES)
        if (piece_data := fetched.get((self, piece))) is not None:
            return piece_data[start:end]
        data = self._bucket.cache.read(f"{self._name}/{piece}", start, end - start)
        if data is not None and _wrong(data, first, self._bucket.digests(self)) is None:
            return data
        return self.fetch(piece)[start:end]


def fetch(pieces: Collection[Piece]) -> dict[Piece, bytes]:
    """Fetch the pieces that are not in the cache, with several concurrent requests. Afterwards they are in the
    cache, if the disk accepts them."""
    missing = [(shard, piece) for shard, piece in pieces if not shard.on_disk(piece)]
    if len(missing) < 2:
        return {(shard, piece): shard.fetch(piece) for shard, piece in missing}
    with ThreadPoolExecutor(FETCHES, thread_name_prefix="holdfast-blocks") as pool:
        return dict(zip(missing, pool.map(lambda item: item[0].fetch(item[1]), missing), strict=True))


def _wrong(data: bytes, first: int, digests: bytes) -> int | None:
    """The first damaged block of `data`, which starts with block `first`, or None."""
    view = memoryview(data)
    for number, at in enumerate(range(0, len(data), BLOCK_BYTES), first):
        if not intact(view[at : at + BLOCK_BYTES], digests, number):
            return number
    return None
