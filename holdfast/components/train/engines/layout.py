"""Where a global tensor lies: one descriptor for every layout and engine, and the boxes that it gives.

A tensor is spread over a mesh of ranks, one placement for each dimension of the mesh: copied, or cut along one of its
own dimensions in chunks of equal size, as `torch.chunk` does (the last ones short or empty). Weights and what the
optimizer keeps for them lie alike.
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
    """The canonical name and shape of a tensor, and which part of it this rank holds."""

    name: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...] = ()  # ranks along each dimension of the mesh; none: one process, or a copy on every rank
    coordinate: tuple[int, ...] = ()  # of this rank in the mesh
    cut: tuple[int | None, ...] = ()  # the tensor's dimension that each of the mesh cuts; None: copied along it
    order: tuple[int, ...] = ()  # in which the dimensions of the mesh cut one of the tensor; none: as they stand

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
        # FSDP2 cuts what tensor parallelism has left, though its ranks come first in the mesh: torch tells by a factor.
        late = [getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements]
        order = tuple(sorted(range(len(cut)), key=late.__getitem__))
        return cls(name, shape, tuple(tensor.device_mesh.shape), tuple(coordinate), cut, order)

    def named(self, prefix: str) -> TensorLayout:
        """The same for what the optimizer keeps for this tensor under `prefix`."""
        return replace(self, name=prefix + self.name)

    def among(self, ranks: int, rank: int) -> TensorLayout:
        """The same of a plain tensor that each of so many ranks holds."""
        return replace(self, mesh=(ranks,), coordinate=(rank,), cut=(None,))

    def copied_over(self, groups: int, group: int) -> TensorLayout:
        """The same of a tensor that lies alike in so many groups of ranks, in this one of which the rank is."""
        return replace(
            self, mesh=(groups, *self.mesh), coordinate=(group, *self.coordinate), cut=(None, *self.cut),
            order=(0, *(index + 1 for index in self.order)) if self.order else (),
        )  # fmt: skip

    @property
    def copied(self) -> tuple[tuple[int, int | None], ...]:
        """What all ranks that hold the same part have in common: of each dimension of the mesh its ranks, and their
        place along it where it cuts this tensor; None where it does not."""
        return tuple(
            (ranks, None if dimension is None else place)
            for ranks, place, dimension in zip(self.mesh, self.coordinate, self.cut, strict=True)
        )

    @property
    def copies(self) -> int:
        """How many ranks hold the same part."""
        return prod(ranks for ranks, dimension in zip(self.mesh, self.cut, strict=True) if dimension is None)

    @property
    def copy(self) -> int:
        """Which of those this rank is."""
        index = 0
        for ranks, place, dimension in zip(self.mesh, self.coordinate, self.cut, strict=True):
            index = index * ranks + place if dimension is None else index
        return index

    def part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of this rank's part. Dimensions of the mesh that cut one tensor dimension cut in turn."""
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
        """This rank's part, which `data` holds (a DTensor or what is local of one)."""
        local = (data.to_local() if isinstance(data, DTensor) else data).detach()
        offset, shape = self.part()
        assert tuple(local.shape) == shape, f"{self.name}: holds {tuple(local.shape)}, the layout says {shape}"
        return TensorBox(self.name, self.shape, offset, local)


def flat_boxes(name: str, shape: tuple[int, ...], start: int, stop: int, flat: torch.Tensor) -> list[TensorBox]:
    """The elements [start, stop) of a tensor in row-major order, which `flat` holds one after another, as boxes that
    are views of it: the rest of the first row, whole rows, the beginning of the last one, and so in every dimension."""
    boxes, done = [], 0
    for offset, size in _rectangles(shape, start, stop):
        elements = prod(size)
        boxes.append(TensorBox(name, shape, offset, flat[done : done + elements].view(size)))
        done += elements
    return boxes


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and shape of the rectangles that a flat range of a tensor is made of, in row-major order."""
    if not shape:
        yield from [((), ())] * (stop - start)
        return
    row = prod(shape[1:])
    while start < stop:
        index, into = divmod(start, row)
        if into or stop - start < row:  # a part of one row
            end = min(stop, (index + 1) * row)
            inside = _rectangles(shape[1:], into, end - index * row)
            yield from (((index, *offset), (1, *size)) for offset, size in inside)
        else:
            rows = (stop - start) // row
            end = start + rows * row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:])
        start = end


def share_out(held: Iterable[tuple[TensorLayout, TensorBox]]) -> list[TensorBox]:
    """This rank's share of the boxes that it holds: all whose part no other rank holds, and of the others its share,
    largest first, each to the rank with least to write."""
    loads: dict[Hashable, list[int]] = {}
    mine = []
    for lying, box in sorted(held, key=lambda each: (-each[1].data.numel(), each[1].name)):
        load = loads.setdefault(lying.copied, [0] * lying.copies)
        owner = load.index(min(load))
        load[owner] += box.data.numel()
        if owner == lying.copy:
            mine.append(box)
    return mine


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """What this rank holds, as a tensor that lies as `parameter` does."""
    if not isinstance(parameter, DTensor):
        return held
    return DTensor.from_local(
        held, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
