"""Indexes: the pieces of one writer in a checkpoint, as columns of numbers. `docs/checkpoint-format.md` has every byte.

A leaf lists a writer's boxes and the place of each piece; the box and its grid imply the pieces themselves. A reader
first checks the digest, and then that no entry points outside. Nothing is unpickled, and no field can make a reader
allocate more memory than the index has bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from holdfast.checkpoint.catalogue import (
    MAX_DIMENSIONS,
    Catalogue,
    TensorInfo,
    catalogue_bytes,
    catalogue_from_bytes,
)
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.index_validation import NO_BASE, validate_index
from holdfast.checkpoint.root import FORMAT_VERSION, UnfitError
from holdfast.checkpoint.tiles import box_widths
from holdfast.spec.errors import DataError

MAGIC = b"HOLDFAST"
LEAF, NODE = 1, 2
MAX_INDEX_BYTES = 1 << 30

_HEAD = struct.Struct("<8s16sII")  # magic, digest of all that follows, version, kind
_BODY = struct.Struct("<QQIIII4QQQ7Q")  # see `sealed`

PACK = np.dtype([("attempt", "<u4"), ("step", "<u8"), ("digest", "u1", 16), ("size", "<u8")])
PLACE = np.dtype(
    [("pack", "<u4"), ("codec", "<u4"), ("start", "<u8"), ("length", "<u4"), ("base", "<i4"), ("digest", "u1", 16)]
)
BOX = np.dtype([("tensor", "<u4"), ("axis", "<u2"), ("ways", "<u2"), ("rows", "<u8")])
RUN = np.dtype([("start", "<u8"), ("height", "<u4")])

Array = NDArray[Any]
Counts = tuple[int, int, int, int, int, int]


class PackName(NamedTuple):
    """A pack, and how large it is."""

    attempt: int
    step: int
    digest: bytes
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.attempt:06d}-{self.step:09d}-{self.digest.hex()}"


class Run(NamedTuple):
    """Rows that are stored band after band (see `tiles`)."""

    start: int  # bytes into the pack
    height: int  # rows


class Place(NamedTuple):
    """The place of a piece's bytes. For a piece in a run, `start` is the position of the digests of its tiles, and
    `length` the first row in the run."""

    pack: PackName
    start: int  # bytes into the pack
    length: int  # bytes there
    codec: int
    digest: bytes  # digest of the raw bytes
    base: Place | None = None  # the base of a difference
    run: Run | None = None


@dataclass(frozen=True)
class Totals:
    """The sums along the tree."""

    digest: StateDigest = field(default_factory=StateDigest)
    coverage: StateDigest = field(default_factory=StateDigest)
    elements: int = 0
    fresh: int = 0  # bytes that were written for this save
    writers: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.digest + other.digest,
            self.coverage + other.coverage,
            self.elements + other.elements,
            self.fresh + other.fresh,
            self.writers + other.writers,
        )


@dataclass(frozen=True)
class Header:
    """The header of every index."""

    step: int
    attempt: int
    number: int  # number of the writer, or of the node within its level
    level: int  # 0: a writer's
    totals: Totals


@dataclass(frozen=True)
class Boxes:
    """The boxes of a leaf, by their tensors and offsets: one row each, padded to the largest number of dimensions."""

    table: Array  # BOX: the tensor (in the catalogue's order), the grid that it is cut on, and its bands
    offset: Array  # int64 [boxes, dimensions], padded with 0
    shape: Array  # int64 [boxes, dimensions], padded with 1

    @cached_property
    def first(self) -> Array:
        """The number of the first piece of each box, followed by the total number of pieces: int64 [boxes + 1]."""
        firsts = np.zeros(len(self.table) + 1, dtype=np.int64)
        np.cumsum(self._pieces(), out=firsts[1:])
        return firsts

    def widths(self, row: int, infos: Sequence[TensorInfo]) -> tuple[int, ...]:
        """The widths of the bands of a box, in bytes; `infos`: the tensors by their numbers."""
        tensor, axis, ways, _ = self.table[row].tolist()
        info = infos[tensor]
        depth = len(info.shape)
        offset, shape = self.offset[row, :depth].tolist(), self.shape[row, :depth].tolist()
        return box_widths(tuple(offset), tuple(shape), info.shape, axis, ways, info.itemsize)

    def _pieces(self) -> Array:
        if not len(self.table):
            return np.zeros(0, dtype=np.int64)
        axis, rows = self.table["axis"].astype(np.int64), self.table["rows"].astype(np.int64)
        every = np.arange(self.shape.shape[1])[None, :] < axis[:, None]
        outer = np.where(every, self.shape, 1).prod(axis=1)
        numbers = np.arange(len(axis))
        low, size = self.offset[numbers, axis], self.shape[numbers, axis]
        inner: Array = np.where(size > 0, -(-(low + size) // rows) - low // rows, 0)
        pieces: Array = outer * inner
        return pieces


@dataclass(frozen=True)
class Index:
    """A leaf: the boxes and pieces of one writer."""

    header: Header
    catalogue: Catalogue
    packs: Array  # PACK
    boxes: Boxes
    places: Array  # PLACE: one for each piece, in the order of boxes and, within one, of its bytes
    bases: Array = field(default_factory=lambda: np.zeros(0, dtype=PLACE))  # the bases of places
    runs: Array = field(default_factory=lambda: np.zeros(0, dtype=RUN))  # the runs of places

    @cached_property
    def names(self) -> list[str]:
        """The tensors by their numbers."""
        return list(self.catalogue)

    @cached_property
    def pack_names(self) -> list[PackName]:
        """The packs by their numbers."""
        return pack_names(self.packs)

    def place(self, number: int) -> Place:
        """The place of piece `number`."""
        return self.places_of([number])[0]

    def places_of(self, numbers: Sequence[int] | slice) -> list[Place]:
        """The places of several pieces."""
        rows = self.places[numbers]
        bases: list[Place] = []
        if ((rows["base"] != NO_BASE) & (rows["codec"] != Codec.TILED)).any():
            bases = self._places(self.bases, [])
        return self._places(rows, bases)

    @cached_property
    def _runs(self) -> list[Run]:
        return [Run(*row) for row in self.runs.tolist()]

    def _places(self, rows: Array, bases: Sequence[Place]) -> list[Place]:
        names, runs, digests = self.pack_names, self._runs, rows["digest"].tobytes()
        columns = (rows[name].tolist() for name in ("pack", "start", "length", "codec", "base"))
        return [
            Place(
                names[pack],
                start,
                length,
                codec,
                digests[16 * number : 16 * number + 16],
                None if base == NO_BASE or codec == Codec.TILED else bases[base],
                runs[base] if codec == Codec.TILED else None,
            )
            for number, (pack, start, length, codec, base) in enumerate(zip(*columns, strict=True))
        ]

    def known(self) -> Iterator[tuple[str, Place]]:
        """The places of all pieces, each with the dtype of its content."""
        dtypes = [info.dtype for info in self.catalogue.values()]
        first = self.boxes.first.tolist()
        for row, tensor in enumerate(self.boxes.table["tensor"].tolist()):
            for place in self.places_of(slice(first[row], first[row + 1])):
                yield dtypes[tensor], place

    def to_bytes(self) -> bytes:
        """The index as it is stored."""
        offsets = np.ascontiguousarray(self.boxes.offset, dtype="<i8")
        shapes = np.ascontiguousarray(self.boxes.shape, dtype="<i8")
        counts = (
            len(self.packs),
            len(self.boxes.table),
            offsets.shape[1],
            len(self.places),
            len(self.bases),
            len(self.runs),
        )
        sections = [
            self.packs.tobytes(),
            self.boxes.table.tobytes(),
            offsets.tobytes(),
            shapes.tobytes(),
            self.places.tobytes(),
            self.bases.tobytes(),
            self.runs.tobytes(),
        ]
        return sealed(LEAF, self.header, catalogue_bytes(self.catalogue), counts, sections)

    @classmethod
    def from_bytes(cls, data: bytes, source: str, digest: str = "") -> Index:
        """Read a stored leaf. Raises DataError, naming `source`, for anything but an intact one, or for one without the
        `digest` that its parent knows. Raises UnfitError for one that a newer Holdfast wrote."""
        opened = unsealed(LEAF, data, source, digest)
        packs, boxes, dimensions, places, bases, runs = opened.counts
        try:
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise ValueError(f"{dimensions} dimensions")
            grids = np.dtype(("<i8", (dimensions,)))
            columns = opened.sections(
                (PACK, packs),
                (BOX, boxes),
                (grids, boxes),
                (grids, boxes),
                (PLACE, places),
                (PLACE, bases),
                (RUN, runs),
            )
            index = cls(
                opened.header,
                catalogue_from_bytes(opened.catalogue),
                columns[0],
                Boxes(columns[1], columns[2], columns[3]),
                columns[4],
                columns[5],
                columns[6],
            )
            validate_index(index)
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{source}: the index is not valid: {error}") from None
        return index


def pack_names(packs: Array) -> list[PackName]:
    """The rows of a table of packs."""
    return [PackName(int(row["attempt"]), int(row["step"]), row["digest"].tobytes(), int(row["size"])) for row in packs]


def pack_table(names: Sequence[PackName]) -> Array:
    """The table that `pack_names` reads."""
    table = np.zeros(len(names), dtype=PACK)
    for number, name in enumerate(names):
        table[number] = (name.attempt, name.step, np.frombuffer(name.digest, dtype=np.uint8), name.size)
    return table


@dataclass(frozen=True)
class Opened:
    """An index whose digest is right: its header, and the undecoded rest."""

    header: Header
    catalogue: bytes
    counts: Counts
    rest: memoryview

    def sections(self, *columns: tuple[np.dtype[Any], int]) -> list[Array]:
        """The tables in the rest, each of a type and a number of rows. Raises ValueError unless they fill it
        exactly."""
        tables, at = [], 0
        for dtype, count in columns:
            size = dtype.itemsize * count
            if at + size > len(self.rest):
                raise ValueError("a table extends beyond the end")
            base, shape = dtype.base, (count, *dtype.shape)
            tables.append(np.frombuffer(self.rest[at : at + size], dtype=base).reshape(shape))
            at += size
        if at != len(self.rest):
            raise ValueError(f"{len(self.rest) - at} bytes are left over")
        return tables


def sealed(kind: int, header: Header, catalogue: bytes, counts: Counts, sections: Sequence[bytes]) -> bytes:
    """An index: header, catalogue and sections, with a digest of it all in front."""
    totals = header.totals
    body = _BODY.pack(
        header.step,
        header.number,
        header.attempt,
        header.level,
        totals.writers,
        0,
        totals.digest.first,
        totals.digest.second,
        totals.coverage.first,
        totals.coverage.second,
        totals.elements,
        totals.fresh,
        len(catalogue),
        *counts,
    )
    rest = b"".join([body, catalogue, *sections])
    return _HEAD.pack(MAGIC, _digest(FORMAT_VERSION, kind, rest), FORMAT_VERSION, kind) + rest


def unsealed(kind: int, data: bytes, source: str, digest: str = "") -> Opened:
    """Verify and open the output of `sealed`. Raises DataError or UnfitError as `Index.from_bytes` does."""
    if len(data) < _HEAD.size + _BODY.size or data[:8] != MAGIC:
        raise DataError(f"{source}: is no index, or a torn one")
    _, claimed, version, found = _HEAD.unpack_from(data)
    rest = memoryview(data)[_HEAD.size :]
    if claimed != _digest(version, found, rest) or (digest and claimed.hex() != digest):
        raise DataError(f"{source}: the index does not match its digest")
    if version > FORMAT_VERSION:
        raise UnfitError(f"{source}: format version {version} is newer than {FORMAT_VERSION}; upgrade Holdfast")
    if (version, found) != (FORMAT_VERSION, kind):
        raise DataError(f"{source}: is no index of this kind (version {version}, kind {found})")
    step, number, attempt, level, writers, _, *sums = _BODY.unpack_from(rest)
    totals = Totals(StateDigest(*sums[:2]), StateDigest(*sums[2:4]), sums[4], sums[5], writers)
    end = _BODY.size + sums[6]
    if end > len(rest):
        raise DataError(f"{source}: the catalogue of the index extends beyond its end")
    header = Header(step, attempt, number, level, totals)
    return Opened(header, bytes(rest[_BODY.size : end]), (*sums[7:13],), rest[end:])


def digest_in(data: bytes) -> str:
    """The digest that an index claims of its content."""
    return str(_HEAD.unpack_from(data)[1].hex())


def _digest(version: int, kind: int, rest: bytes | memoryview) -> bytes:
    return blake3(struct.pack("<II", version, kind)).update(rest).digest(16)
