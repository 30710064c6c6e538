"""Where a global tensor lies: one descriptor for every layout and engine, and the boxes that it gives.

A tensor is spread over a mesh of ranks, one placement for each dimension of the mesh: copied, or cut along one of its
own dimensions in chunks of equal size, as `torch.chunk` does (the last ones short or empty). Weights and what the
optimizer keeps for them lie alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from holdfast.components.checkpoint import TensorBox


@dataclass(frozen=True)
class TensorLayout:
    """The canonical name and shape of a tensor, and which part of it this rank holds."""

    name: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...] = ()  # ranks along each dimension of the mesh; none: one process, or a copy on every rank
    coordinate: tuple[int, ...] = ()  # of this rank in the mesh
    cut: tuple[int | None, ...] = ()  # the tensor's dimension that each of the mesh cuts; None: copied along it

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorLayout:
        """The layout of a plain tensor (whole on every rank) or of a DTensor. Raises ValueError for one with partial
        sums, which is no state."""
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(name, shape)
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name}: this rank holds no part of it that could be saved ({tensor.placements})")
        cut = tuple(placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements)
        return cls(name, shape, tuple(tensor.device_mesh.shape), tuple(coordinate), cut)

    def named(self, prefix: str) -> TensorLayout:
        """The same for what the optimizer keeps for this tensor under `prefix`."""
        return TensorLayout(prefix + self.name, self.shape, self.mesh, self.coordinate, self.cut)

    def part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of this rank's part. Dimensions of the mesh that cut one tensor dimension cut in turn."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for ranks, place, dimension in zip(self.mesh, self.coordinate, self.cut, strict=True):
            if dimension is None:
                continue
            chunk = -(-shape[dimension] // ranks)
            low = min(place * chunk, shape[dimension])
            offset[dimension] += low
            shape[dimension] = min(chunk, shape[dimension] - low)
        return tuple(offset), tuple(shape)

    def box(self, data: torch.Tensor) -> TensorBox:
        """This rank's part, which `data` holds (a DTensor or what is local of one)."""
        local = (data.to_local() if isinstance(data, DTensor) else data).detach()
        offset, shape = self.part()
        assert tuple(local.shape) == shape, f"{self.name}: holds {tuple(local.shape)}, the layout says {shape}"
        return TensorBox(self.name, self.shape, offset, local)


def share_out(boxes: Sequence[TensorBox], rank: int, world: int) -> list[TensorBox]:
    """This rank's share of boxes that every rank holds whole: largest first, each to the rank with least to write."""
    loads = [0] * world
    mine = []
    for box in sorted(boxes, key=lambda box: (-box.data.numel(), box.name)):
        owner = loads.index(min(loads))
        loads[owner] += box.data.numel()
        if owner == rank:
            mine.append(box)
    return mine
