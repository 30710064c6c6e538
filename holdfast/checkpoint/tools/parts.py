"""A tensor in parts of bounded size, to be read one after another."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from holdfast.checkpoint.box import DTYPES, TensorBox, grid
from holdfast.checkpoint.catalogue import TensorInfo

PART_BYTES = 16 * 2**20


def parts_of(name: str, info: TensorInfo) -> Iterator[TensorBox]:
    """Boxes that make up a tensor, in the order of its rows, cut on its grid so that each piece is read once. All share
    the same memory, which the next one overwrites. Yields none for a tensor without elements."""
    dtype = DTYPES[info.dtype]
    if not info.shape:
        yield TensorBox.whole(name, torch.empty((), dtype=dtype))
        return
    axis, cut = grid(info.shape, info.itemsize)
    rows = 1 if axis else cut
    row_bytes = max(1, prod(info.shape[1:]) * info.itemsize)
    rows *= max(1, PART_BYTES // (rows * row_bytes))
    if not info.elements:
        return
    memory = torch.empty((min(rows, info.shape[0]), *info.shape[1:]), dtype=dtype)
    for first in range(0, info.shape[0], rows):
        place = (first, *(0 for _ in info.shape[1:]))
        yield TensorBox(name, info.shape, place, memory[: min(rows, info.shape[0] - first)])
