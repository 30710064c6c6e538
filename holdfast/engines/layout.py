"""Layout of a global tensor over ranks: one descriptor for every engine, and the boxes that follow from it.

A tensor is spread over a mesh of ranks, with one placement for each mesh dimension. It is copied, or split along one of
its dimensions in chunks of equal size, as `torch.chunk` does (the last ones short or empty). Optimizer state has the
layout of its weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import TensorBox


@dataclass(frozen=True)
class TensorLayout:
    """The canonical name and shape of a tensor, and the part of it on this rank."""

    name: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...] = ()  # ranks along each mesh dimension; empty: one process, or a copy on every rank
    coordinate: tuple[int, ...] = ()  # of this rank in the mesh
    cut: tuple[int | None, ...] = ()  # the tensor dimension that each mesh dimension splits; None: copied along it
    order: tuple[int, ...] = ()  # in which mesh dimensions split one tensor dimension; empty: mesh order

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
        cut = tuple(getattr(placement, "dim", None) for placement in tensor.placements)
        # FSDP2 splits what tensor parallelism leaves, although its ranks come first in the mesh. torch marks that by a
        # factor.
        late = [getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements]
        order = tuple(sorted(range(len(cut)), key=late.__getitem__))
        return cls(name, shape, tuple(tensor.device_mesh.shape), tuple(coordinate), cut, order)

    def named(self, prefix: str) -> TensorLayout:
        """This layout for the optimizer state under `prefix`."""
        return replace(self, name=prefix + self.name)

    def among(self, ranks: int, rank: int) -> TensorLayout:
        """This layout for a plain tensor that each of `ranks` ranks holds."""
        return replace(self, mesh=(ranks,), coordinate=(rank,), cut=(None,))

    def copied_over(self, groups: int, group: int) -> TensorLayout:
        """This layout for a tensor that `groups` groups of ranks hold alike. This rank is in group `group`."""
        return replace(
            self,
            mesh=(groups, *self.mesh),
            coordinate=(group, *self.coordinate),
            cut=(None, *self.cut),
            order=(0, *(index + 1 for index in self.order)) if self.order else (),
        )

    @property
    def copied(self) -> tuple[tuple[int, int | None], ...]:
        """A key shared by all ranks that hold the same part. For each mesh dimension: its ranks, and their position
        where it splits this tensor, else None."""
        return tuple(
            (ranks, None if dimension is None else place)
            for ranks, place, dimension in zip(self.mesh, self.coordinate, self.cut, strict=True)
        )

    @property
    def copies(self) -> int:
        """The number of ranks that hold the same part."""
        return prod(ranks for ranks, dimension in zip(self.mesh, self.cut, strict=True) if dimension is None)

    @property
    def copy(self) -> int:
        """The index of this rank among those."""
        index = 0
        for ranks, place, dimension in zip(self.mesh, self.coordinate, self.cut, strict=True):
            index = index * ranks + place if dimension is None else index
        return index

    def part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of this rank's part. Mesh dimensions that split the same tensor dimension apply one after
        another."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for index in self.order or range(len(self.mesh)):
            ranks, place, dimension = self.mesh[index], self.coordinate[index], self.cut[index]
            if dimension is None:
                continue
            chunk = -(-shape[dimension] // ranks)
            low = min(place * chunk, shape[dimension])
            offset[dimension] += low
            shape[dimension] = min(chunk, shape[dimension] - low)
        return tuple(offset), tuple(shape)

    def box(self, data: torch.Tensor) -> TensorBox:
        """This rank's part as a box with the values of `data` (a DTensor or its local tensor)."""
        local = (data.to_local() if isinstance(data, DTensor) else data).detach()
        offset, shape = self.part()
        assert tuple(local.shape) == shape, f"{self.name}: holds {tuple(local.shape)}, the layout says {shape}"
        return TensorBox(self.name, self.shape, offset, local)


def flat_boxes(name: str, shape: tuple[int, ...], start: int, stop: int, flat: torch.Tensor) -> list[TensorBox]:
    """The elements [start, stop) of a tensor in row-major order, as boxes. `flat` holds them, and the boxes are
    views of it. They are the rest of the first row, whole rows, and the start of the last row, recursively in every
    dimension."""
    boxes, position = [], 0
    for offset, size in _rectangles(shape, start, stop):
        elements = prod(size)
        boxes.append(TensorBox(name, shape, offset, flat[position : position + elements].view(size)))
        position += elements
    return boxes


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and shapes of the rectangles that make up a flat range of a tensor, in row-major order."""
    if not shape:
        yield from [((), ())] * (stop - start)
        return
    row = prod(shape[1:])
    while start < stop:
        index, column = divmod(start, row)
        if column or stop - start < row:  # a part of one row
            end = min(stop, (index + 1) * row)
            rectangles = _rectangles(shape[1:], column, end - index * row)
            yield from (((index, *offset), (1, *size)) for offset, size in rectangles)
        else:
            rows = (stop - start) // row
            end = start + rows * row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
        start = end


def share_out(held: Iterable[tuple[TensorLayout, TensorBox]]) -> list[TensorBox]:
    """This rank's share of its boxes to save: all parts that only it holds, and some of the shared parts. Shared
    parts are assigned largest first, each to the rank with the fewest elements to write."""
    loads: dict[Hashable, list[int]] = {}
    own = []
    for layout, box in sorted(held, key=lambda each: (-each[1].data.numel(), each[1].name)):
        load = loads.setdefault(layout.copied, [0] * layout.copies)
        owner = load.index(min(load))
        load[owner] += box.data.numel()
        if owner == layout.copy:
            own.append(box)
    return own


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """The local part `held` as a tensor with the layout of `parameter`."""
    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
