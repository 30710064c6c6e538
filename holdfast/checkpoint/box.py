"""A box: the part of a global tensor that one rank holds, and how it is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# Every dtype that a manifest may contain, by its name there.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
}

# Pieces are the unit of checksums, of deduplication and of reading. They are small enough that another layout reads
# little more than it needs, and that little is written again. They are large enough that an index stays small.
PIECE_BYTES = 256 * 2**10


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


def grid(shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """The grid of a tensor as (axis, rows): cuts at the multiples of `rows` along `axis`, and at every index of the
    axes before it. It depends on the global tensor only, so the pieces of two layouts are the same wherever neither
    cuts through one. A piece has about PIECE_BYTES of full rows."""
    inner = itemsize
    for axis in reversed(range(len(shape))):
        if axis == 0 or inner * shape[axis] > PIECE_BYTES:
            return axis, max(1, PIECE_BYTES // max(1, inner))
        inner *= shape[axis]
    return 0, 1


def as_bytes(data: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    array: np.ndarray = data.contiguous().flatten().view(torch.uint8).numpy()
    return array.data


def overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The intersection of two boxes of one tensor, as slices into the first and into the second; None if they do not
    meet."""
    mine, theirs = [], []
    for start, size, other_start, other_size in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(start, other_start), min(start + size, other_start + other_size)
        if low >= high:
            return None
        mine.append(slice(low - start, high - start))
        theirs.append(slice(low - other_start, high - other_start))
    return tuple(mine), tuple(theirs)
