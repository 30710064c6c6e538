"""The tree above the indexes: a parent's entries for its children, and nodes with up to FANOUT children each.

A parent knows each child's *reach*: the tensors that it holds a part of. For each distinct global shape, it also has
the range of rows and columns between the first and the last. So a reader fetches only children that may overlap its
boxes. The size of a node or root grows with FANOUT and the number of tensors, never with the number of writers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.catalogue import Catalogue, catalogue_bytes, catalogue_from_bytes, merged
from holdfast.checkpoint.index import (
    NODE,
    PACK,
    Array,
    Header,
    Index,
    PackName,
    Totals,
    digest_in,
    pack_names,
    sealed,
    unsealed,
)
from holdfast.spec.errors import DataError

FANOUT = 32
Span = tuple[int, int, int, int]  # first row, row after the last, first column, column after the last


class Reach(BaseModel, extra="forbid", frozen=True):
    """The tensors that a child may hold a part of, over the catalogue of its parent."""

    tensors: str = Field(pattern=r"^([0-9a-f]{2})*$")  # a bit for each, in the order of names, lowest bit first
    spans: tuple[Span | None, ...]  # for each distinct shape, in order


class Entry(BaseModel, extra="forbid", frozen=True):
    """A parent's record of a child."""

    name: str = Field(pattern=r"^[0-9]{6,}-[0-9]{9,}/(node-[0-9]{1,2}-)?[0-9]{5,}\.idx$")
    size: int = Field(ge=0)  # bytes
    digest: str = Field(pattern=r"^[0-9a-f]{32}$")  # the one in its header
    fresh: int = Field(ge=0)  # bytes that were written for this save
    reach: Reach

    @property
    def is_node(self) -> bool:
        """Whether it has children itself."""
        return "/node-" in self.name


@dataclass(frozen=True)
class Node:
    """The indexes of up to FANOUT children, and every pack that they need."""

    header: Header
    catalogue: Catalogue
    packs: Array
    entries: tuple[Entry, ...]

    @cached_property
    def pack_names(self) -> list[PackName]:
        """The packs."""
        return pack_names(self.packs)

    def to_bytes(self) -> bytes:
        """The node as it is stored."""
        entries = json.dumps([entry.model_dump(mode="json") for entry in self.entries], separators=(",", ":")).encode()
        counts = (len(self.packs), len(entries), 0, 0, 0, 0)
        return sealed(NODE, self.header, catalogue_bytes(self.catalogue), counts, [self.packs.tobytes(), entries])

    @classmethod
    def from_bytes(cls, data: bytes, source: str, digest: str = "") -> Node:
        """Read a stored node. Raises as `Index.from_bytes`."""
        opened = unsealed(NODE, data, source, digest)
        try:
            packs, entries = opened.sections((PACK, opened.counts[0]), (np.dtype("u1"), opened.counts[1]))
            catalogue = catalogue_from_bytes(opened.catalogue)
            children = tuple(Entry.model_validate(entry) for entry in json.loads(entries.tobytes()))
            require_entries(children, catalogue)
        except (ValueError, TypeError, RecursionError, ValidationError) as error:
            raise DataError(f"{source}: the index is not valid: {error}") from None
        return cls(opened.header, catalogue, packs, children)


def child_from_bytes(entry: Entry, data: bytes, source: str) -> Index | Node:
    """Parse the child of an entry. Raises as `Index.from_bytes`."""
    kind = Node if entry.is_node else Index
    return kind.from_bytes(data, source, entry.digest)


def require_entries(entries: Sequence[Entry], catalogue: Catalogue) -> None:
    """Raises ValueError for children whose reach is not over this catalogue."""
    if len(entries) > FANOUT:
        raise ValueError(f"{len(entries)} children, at most {FANOUT} are allowed")
    bits, spans = -(-len(catalogue) // 8), len(shapes_of(catalogue))
    for entry in entries:
        if len(entry.reach.tensors) != 2 * bits or len(entry.reach.spans) != spans:
            raise ValueError(f"what {entry.name} reaches is not over these {len(catalogue)} tensors")


def shapes_of(catalogue: Catalogue) -> list[tuple[int, ...]]:
    """The distinct shapes of a catalogue, in order."""
    return sorted({info.shape for info in catalogue.values()})


@dataclass(frozen=True)
class Wanted:
    """The boxes of a reader, as arrays over one catalogue."""

    tensors: NDArray[np.int64]  # of each box
    shapes: NDArray[np.int64]
    spans: NDArray[np.int64]  # [boxes, 4]

    @classmethod
    def of(cls, boxes: Iterable[TensorBox], catalogue: Catalogue) -> Wanted:
        """The non-empty boxes whose tensors are in the catalogue."""
        numbers = {name: number for number, name in enumerate(catalogue)}
        shapes = {shape: number for number, shape in enumerate(shapes_of(catalogue))}
        rows = [
            (numbers[box.name], shapes[box.global_shape], *_span(box.offset, tuple(box.data.shape)))
            for box in boxes
            if box.name in numbers and box.data.numel() and box.global_shape in shapes
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 6)
        return cls(table[:, 0], table[:, 1], table[:, 2:])

    def may_meet(self, reach: Reach) -> bool:
        """Whether a child with this reach may overlap the boxes."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(reach.tensors), dtype=np.uint8), bitorder="little")
        spans = np.array([span or (0, 0, 0, 0) for span in reach.spans], dtype=np.int64).reshape(-1, 4)[self.shapes]
        low, high = np.maximum(spans[:, ::2], self.spans[:, ::2]), np.minimum(spans[:, 1::2], self.spans[:, 1::2])
        return bool((bits[self.tensors].astype(bool) & (low < high).all(axis=1)).any())


def _span(offset: tuple[int, ...], shape: tuple[int, ...]) -> Span:
    low, size = [*offset[:2], 0, 0], [*shape[:2], 1, 1]
    return low[0], low[0] + size[0], low[1], low[1] + size[1]


class Children:
    """The children of one parent, gathered: their common catalogue, sums, packs and entries."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._found: list[tuple[str, int, str, Index | Node]] = []

    def add(self, name: str, data: bytes) -> Header:
        """Add a stored child. Raises DataError for one that is not intact."""
        kind = Node if "/node-" in name else Index
        child = kind.from_bytes(data, name)
        self._found.append((name, len(data), digest_in(data), child))
        return child.header

    @property
    def totals(self) -> Totals:
        """The sums of all."""
        return sum((child.header.totals for *_, child in self._found), Totals())

    def catalogue(self) -> Catalogue:
        """The tensors of all. Raises DataError where they do not agree."""
        return merged((child.catalogue for *_, child in self._found), self._source)

    def packs(self) -> Array:
        """The packs of all, each once."""
        rows = np.concatenate([child.packs for *_, child in self._found])
        return np.unique(rows.view(np.dtype((np.void, PACK.itemsize)))).view(PACK)

    def entries(self, catalogue: Catalogue) -> tuple[Entry, ...]:
        """The entries of a parent with this catalogue, in the order of their names."""
        return tuple(
            Entry(name=name, size=size, digest=digest, fresh=child.header.totals.fresh, reach=_reach(child, catalogue))
            for name, size, digest, child in sorted(self._found, key=lambda each: each[0])
        )


def _reach(child: Index | Node, catalogue: Catalogue) -> Reach:
    own = list(child.catalogue)
    shapes = shapes_of(child.catalogue)
    if isinstance(child, Index):
        contained, spans = _reach_of_leaf(child, shapes)
    else:
        contained, spans = np.zeros(len(own), dtype=bool), {}
        for entry in child.entries:
            bits = np.frombuffer(bytes.fromhex(entry.reach.tensors), dtype=np.uint8)
            contained |= np.unpackbits(bits, bitorder="little")[: len(own)].astype(bool)
            for shape, span in zip(shapes, entry.reach.spans, strict=True):
                if span is not None:
                    spans[shape] = _around(spans.get(shape), span)
    numbers = {name: number for number, name in enumerate(catalogue)}
    every = np.zeros(len(catalogue), dtype=bool)
    every[[numbers[name] for name, has in zip(own, contained, strict=True) if has]] = True
    bits = np.packbits(every, bitorder="little")
    return Reach(tensors=bits.tobytes().hex(), spans=tuple(spans.get(shape) for shape in shapes_of(catalogue)))


def _reach_of_leaf(leaf: Index, shapes: list[tuple[int, ...]]) -> tuple[Array, dict[tuple[int, ...], Span]]:
    tensors = leaf.boxes.table["tensor"]
    contained = np.zeros(len(leaf.catalogue), dtype=bool)
    contained[tensors] = True
    infos, numbers = list(leaf.catalogue.values()), {shape: number for number, shape in enumerate(shapes)}
    of_tensor = np.array([numbers[info.shape] for info in infos], dtype=np.int64)[tensors]
    low, high = leaf.boxes.offset, leaf.boxes.offset + leaf.boxes.shape
    if low.shape[1] == 1:
        low, high = np.pad(low, ((0, 0), (0, 1))), np.pad(high, ((0, 0), (0, 1)), constant_values=1)
    spans = {}
    for number in np.unique(of_tensor):
        selected = of_tensor == number
        first, last = low[selected, :2].min(axis=0).tolist(), high[selected, :2].max(axis=0).tolist()
        spans[shapes[number]] = (first[0], last[0], first[1], last[1])
    return contained, spans


def _around(one: Span | None, other: Span) -> Span:
    if one is None:
        return other
    return min(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2]), max(one[3], other[3])
