"""Tiles: pieces are full rows, cut into bands of columns, so that a reader of some columns reads no others.

The digest of a piece of several bands is a digest of the digests of its tiles, so an index does not grow with them. A
reader of some tiles also needs the digests of all tiles of their piece, which lie in the same pack. Consecutive rows
are stored as a *run*, band after band, so that columns of many rows are read together.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from blake3 import blake3

DIGEST_BYTES = 16
WAYS = (1, 2, 3, 4, 6, 8)  # numbers of equal parts of its columns that a reader may want
WAYS_MASK = sum(1 << ways - 1 for ways in WAYS)
MAX_WAYS = 16
WIDE_BYTES = 1024  # shorter rows are not cut
_FORM = struct.Struct("<QQ")


class Form(NamedTuple):
    """A piece as rows of bytes, and the bands that they are cut into."""

    height: int  # rows
    widths: tuple[int, ...]  # bytes of a row in each band

    @property
    def size(self) -> int:
        """Bytes."""
        return self.height * sum(self.widths)

    @property
    def table(self) -> int:
        """Bytes of the digests of its tiles; 0 for a piece of one band, which needs none."""
        return DIGEST_BYTES * len(self.widths) if len(self.widths) > 1 else 0


def ways_of(shape: tuple[int, ...], axis: int, itemsize: int) -> int:
    """The ways in which the columns of a tensor are cut, with a bit for each, the lowest for one part. Its rows are
    those of `axis`. Depends on the global tensor only."""
    row = prod(shape[axis + 1 :]) * itemsize
    if len(shape) <= axis + 1 or shape[axis + 1] < 2 or row < WIDE_BYTES:
        return 1
    return WAYS_MASK


@lru_cache(maxsize=1 << 12)
def edges(size: int, ways: int) -> tuple[int, ...]:
    """The cuts of `size` columns: the starts of equal parts (the last one may be shorter), and the end."""
    cut = {size}
    for number in range(1, MAX_WAYS + 1):
        if ways >> number - 1 & 1:
            cut |= {min(part * -(-size // number), size) for part in range(number)}
    return tuple(sorted(cut))


@lru_cache(maxsize=1 << 14)
def widths_of(low: int, columns: int, size: int, ways: int, bytes_each: int) -> tuple[int, ...]:
    """The widths of the bands of a box that has the columns [low, low + columns) of `size`, in bytes."""
    inner = [edge for edge in edges(size, ways) if low < edge < low + columns]
    cut = [low, *inner, low + columns]
    return tuple((end - start) * bytes_each for start, end in pairwise(cut))


def box_widths(
    offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...], axis: int, ways: int, itemsize: int
) -> tuple[int, ...]:
    """The widths of the bands of a box of a tensor of shape `whole`, in bytes."""
    if len(shape) <= axis + 1:
        return (itemsize,)
    inner = prod(shape[axis + 2 :]) * itemsize
    return widths_of(offset[axis + 1], shape[axis + 1], whole[axis + 1], ways, inner)


def tiled(rows: np.ndarray, widths: Sequence[int], run: np.ndarray, row: int, height: int) -> None:
    """Lay bytes [rows, row] out band after band, as the rows from `row` of a run of `height` rows."""
    at, low = 0, 0
    for width in widths:
        start = at + row * width
        run[start : start + len(rows) * width].reshape(len(rows), width)[:] = rows[:, low : low + width]
        at, low = at + height * width, low + width


def untiled(tiles: Sequence[memoryview], form: Form) -> memoryview:
    """The bytes of a piece, row after row, from those of its tiles."""
    raw = bytearray(form.size)
    rows, low = np.frombuffer(raw, dtype=np.uint8).reshape(form.height, -1), 0
    for tile, width in zip(tiles, form.widths, strict=True):
        rows[:, low : low + width] = np.frombuffer(tile, dtype=np.uint8).reshape(form.height, width)
        low += width
    return memoryview(raw)


def tiles_of(tiles: memoryview, height: int, row: int, form: Form) -> list[memoryview]:
    """The tiles of a piece whose first row is `row`, from `height` rows that are stored band after band."""
    parts, at = [], 0
    for width in form.widths:
        start = at + row * width
        parts.append(tiles[start : start + form.height * width])
        at += height * width
    return parts


def tile_digests(tiles: Sequence[memoryview]) -> bytes:
    """The digests of tiles, one after another."""
    return b"".join([blake3(tile).digest(DIGEST_BYTES) for tile in tiles])


def digest_of_tiles(digests: bytes | memoryview, form: Form) -> bytes:
    """The digest of a piece, from those of its tiles."""
    return blake3(_FORM.pack(form.height, sum(form.widths)) + digests).digest(DIGEST_BYTES)


def piece_digest(raw: memoryview, form: Form) -> bytes:
    """The digest of a piece, from its bytes row after row."""
    if len(form.widths) == 1:
        return blake3(raw).digest(DIGEST_BYTES)
    run = np.empty(form.size, dtype=np.uint8)
    tiled(np.frombuffer(raw, dtype=np.uint8).reshape(form.height, -1), form.widths, run, 0, form.height)
    return digest_of_tiles(tile_digests(tiles_of(run.data, form.height, 0, form)), form)
