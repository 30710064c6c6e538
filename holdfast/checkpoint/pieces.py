"""Pieces: which pieces of an index a box needs, their places, and decoding stored bytes into verified raw ones."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

import numpy as np
import torch

from holdfast.checkpoint.box import DTYPES, TensorBox, overlap
from holdfast.checkpoint.codec import Codec, decode_into
from holdfast.checkpoint.index import Index, Place
from holdfast.checkpoint.root import UnfitError
from holdfast.checkpoint.tiles import Form, digest_of_tiles, piece_digest, tile_digests, tiles_of, untiled
from holdfast.spec.errors import DataError
from holdfast.store import Store, layout


@dataclass(frozen=True)
class Use:
    """A piece that is needed for a part of a box."""

    place: Place
    index: str  # key of the index that names it
    number: int  # number of the piece in that index
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    box: TensorBox
    axis: int  # axis of its rows
    form: Form

    @property
    def bands(self) -> list[int]:
        """The numbers of the bands that overlap the box."""
        met = overlap(self.offset, self.shape, self.box.offset, tuple(self.box.data.shape))
        if met is None:
            return []
        low, high = (end * self._column for end in (met[0][self.axis + 1].start, met[0][self.axis + 1].stop))
        ends = list(accumulate(self.form.widths))
        return list(range(bisect_right(ends, low), bisect_left(ends, high) + 1))

    def tile(self, band: int) -> Use:
        """The piece's part of a band, as a separate piece."""
        before, width, column = sum(self.form.widths[:band]), self.form.widths[band], self.axis + 1
        low, columns = self.offset[column] + before // self._column, width // self._column
        return replace(
            self,
            offset=(*self.offset[:column], low, *self.offset[column + 1 :]),
            shape=(*self.shape[:column], columns, *self.shape[column + 1 :]),
            form=Form(self.form.height, (width,)),
        )

    @property
    def _column(self) -> int:
        """Bytes of a column in one row."""
        return sum(self.form.widths) // self.shape[self.axis + 1]


def decode(
    place: Place, stored: memoryview, dtype: str, form: Form, base: memoryview | None = None
) -> memoryview | None:
    """The raw bytes of a piece of `dtype`, row after row, from the bytes stored at `place` or from its concatenated
    tiles. `base`: the raw bytes of its base. None when they do not match the digest. Every reader of whole pieces uses
    it. Raises UnfitError for a codec that this version does not know."""
    if place.codec == Codec.TILED:
        return _joined(place, tiles_of(stored, form.height, 0, form), form)
    if place.codec not in set(Codec):
        raise UnfitError(f"pack {place.pack}: codec {place.codec} is unknown; upgrade Holdfast")
    raw = stored
    if place.codec != Codec.RAW:
        raw = memoryview(bytearray(form.size))
        try:
            decode_into(stored, Codec(place.codec), dtype, raw, base)
        except DataError:
            return None
    return raw if raw.nbytes == form.size and piece_digest(raw, form) == place.digest else None


def _joined(place: Place, tiles: Sequence[memoryview], form: Form) -> memoryview | None:
    return untiled(tiles, form) if digest_of_tiles(tile_digests(tiles), form) == place.digest else None


def in_run(place: Place, run: memoryview, form: Form) -> memoryview | None:
    """The raw bytes of a piece, from those of its whole run. None when they do not match the digest."""
    assert place.run is not None
    if place.length + form.height > place.run.height:
        return None
    return _joined(place, tiles_of(run, place.run.height, place.length, form), form)


def read_piece(store: Store, run_id: str, place: Place, dtype: str, form: Form) -> memoryview | None:
    """The raw bytes of one piece; None when they fail their checksum. Raises DataError or MissingError."""
    key = layout.pack(run_id, str(place.pack))
    if place.run is not None:
        stored, position = memoryview(bytearray(form.size)), 0
        for start, length in tile_ranges(place, form):
            store.read_into(key, start, stored[position : position + length])
            position += length
        table = store.get(key, place.start, form.table)
        return decode(place, stored, dtype, form) if digest_of_tiles(table, form) == place.digest else None
    stored = memoryview(bytearray(place.length))
    store.read_into(key, place.start, stored)
    base = None if place.base is None else read_piece(store, run_id, place.base, dtype, form)
    if base is None and place.base is not None:
        return None
    return decode(place, stored, dtype, form, base)


def tile_ranges(place: Place, form: Form) -> list[tuple[int, int]]:
    """The places of a piece's tiles in the pack, for a piece in a run: start and length of each, in bytes."""
    assert place.run is not None
    ranges, start = [], place.run.start
    for width in form.widths:
        ranges.append((start + place.length * width, form.height * width))
        start += place.run.height * width
    return ranges


def piece_fails(store: Store, run_id: str, index: Index, number: int) -> bool:
    """Whether a piece of an index fails its checksum here. Raises DataError or MissingError."""
    row = int(np.searchsorted(index.boxes.first, number, side="right")) - 1
    info = index.catalogue[index.names[int(index.boxes.table["tensor"][row])]]
    offset, shape, axis, rows = _box(index, row, len(info.shape))
    pieces = pieces_of(offset, shape, axis, rows, tuple(slice(0, size) for size in shape))
    at = number - int(index.boxes.first[row])
    sizes = next(sizes for piece_number, _, sizes in pieces if piece_number == at)
    form = Form(_height(sizes, axis), index.boxes.widths(row, list(index.catalogue.values())))
    return read_piece(store, run_id, index.place(number), info.dtype, form) is None


def _height(shape: tuple[int, ...], axis: int) -> int:
    return shape[axis] if shape else 1


def uses_of(key: str, index: Index, boxes: dict[str, list[TensorBox]]) -> Iterator[Use]:
    """The pieces of an index that the boxes need."""
    numbers = {number: name for number, name in enumerate(index.names) if name in boxes}
    table, infos = index.boxes.table, list(index.catalogue.values())
    for row in np.flatnonzero(np.isin(table["tensor"], list(numbers))).tolist():
        name = numbers[int(table["tensor"][row])]
        offset, shape, axis, rows = _box(index, row, len(index.catalogue[name].shape))
        first, widths = int(index.boxes.first[row]), index.boxes.widths(row, infos)
        for box in boxes[name]:
            if (meeting := overlap(offset, shape, box.offset, tuple(box.data.shape))) is None:
                continue
            pieces = list(pieces_of(offset, shape, axis, rows, meeting[0]))
            places = index.places_of([first + number for number, _, _ in pieces])
            for (number, low, size), place in zip(pieces, places, strict=True):
                yield Use(place, key, first + number, low, size, box, axis, Form(_height(size, axis), widths))


def _box(index: Index, row: int, dimensions: int) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Offset and shape of a box of an index, and the axis and rows of its grid."""
    boxes = index.boxes
    offset, shape = boxes.offset[row, :dimensions].tolist(), boxes.shape[row, :dimensions].tolist()
    return tuple(offset), tuple(shape), int(boxes.table["axis"][row]), int(boxes.table["rows"][row])


def pieces_of(
    offset: tuple[int, ...], shape: tuple[int, ...], axis: int, rows: int, part: tuple[slice, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The pieces of an index's box that overlap a part of it: number, offset and shape of each."""
    if not shape:
        yield 0, (), ()
        return
    low, end = offset[axis], offset[axis] + shape[axis]
    first = low // rows
    along = -(-end // rows) - first
    for outer in product(*(range(cut.start, cut.stop) for cut in part[:axis])):
        before = 0
        for index, size in zip(outer, shape, strict=False):
            before = before * size + index
        for cell in range((low + part[axis].start) // rows, -(-(low + part[axis].stop) // rows)):
            start, stop = max(low, cell * rows), min(end, (cell + 1) * rows)
            place = tuple(base + index for base, index in zip(offset, outer, strict=False))
            yield (
                before * along + cell - first,
                (*place, start, *offset[axis + 1 :]),
                (*(1 for _ in outer), stop - start, *shape[axis + 1 :]),
            )


def meeting_shape(use: Use) -> tuple[int, ...]:
    met = overlap(use.offset, use.shape, use.box.offset, tuple(use.box.data.shape))
    return (0,) if met is None else tuple(part.stop - part.start for part in met[0])


def copy_part(raw: memoryview, use: Use) -> None:
    meeting = overlap(use.offset, use.shape, use.box.offset, tuple(use.box.data.shape))
    dtype = DTYPES[use.box.dtype_name]
    if meeting is None:
        return
    saved = torch.frombuffer(raw, dtype=dtype).view(use.shape)
    from_piece, into_box = meeting
    with torch.no_grad():
        use.box.data[into_box].copy_(saved[from_piece])
