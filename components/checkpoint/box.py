"""A box: the part of a global tensor that one rank holds, and how it is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

# Every dtype that may stand in a manifest, by the name it has there.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}

# Pieces are the unit of checksums, of deduplication and of reading: small enough to read little of a tensor, large
# enough that a manifest stays small.
PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class TensorBox:
    """A rectangular part of the global tensor `name`: `data`, whose first element has the index `offset` there."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor

    @classmethod
    def whole(cls, name: str, data: torch.Tensor) -> TensorBox:
        """A box that is the whole tensor."""
        return cls(name, tuple(data.shape), (0,) * data.dim(), data)

    @property
    def dtype_name(self) -> str:
        """The dtype as written in a manifest."""
        return str(self.data.dtype).removeprefix("torch.")

    def pieces(self) -> Iterator[TensorBox]:
        """The box cut along its first dimension into pieces of at most PIECE_BYTES (one row at least). An empty part of
        a tensor has none; a tensor that is empty itself is one piece, so that a manifest knows it."""
        if self.data.numel() == 0:
            if prod(self.global_shape) == 0:
                yield self
            return
        if self.data.dim() == 0:
            yield self
            return
        row_bytes = prod(self.data.shape[1:]) * self.data.element_size()
        rows = max(1, PIECE_BYTES // max(1, row_bytes))
        for start in range(0, self.data.shape[0], rows):
            offset = (self.offset[0] + start, *self.offset[1:])
            yield TensorBox(self.name, self.global_shape, offset, self.data[start : start + rows])


def as_bytes(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: np.ndarray = data.contiguous().flatten().view(torch.uint8).numpy()
    return array.data


def overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes of one tensor meet, as slices into the first and into the second; None if they do not."""
    mine, theirs = [], []
    for start, size, other_start, other_size in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(start, other_start), min(start + size, other_start + other_size)
        if low >= high:
            return None
        mine.append(slice(low - start, high - start))
        theirs.append(slice(low - other_start, high - other_start))
    return tuple(mine), tuple(theirs)
