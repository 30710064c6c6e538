"""Packing: how boxes are cut into pieces, and the order of pieces in a pack.

A pack begins with the digests of tiles, so that a reader of some columns gets those of many pieces in one read. The
pieces follow, and the runs of pieces of several bands. `docs/checkpoint-format.md` has every byte.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from blake3 import blake3

from holdfast.checkpoint.box import TensorBox, as_bytes, grid
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.compress import Stored
from holdfast.checkpoint.index import PackName, Place, Run
from holdfast.checkpoint.tiles import (
    WAYS_MASK,
    Form,
    box_widths,
    digest_of_tiles,
    edges,
    tile_digests,
    tiled,
    tiles_of,
    ways_of,
)

PACK_BYTES = 256 * 2**20
RUN_BYTES = 4 * 2**20  # limit of the rows whose tiles are stored together

Content = tuple[bytes, str]  # digest and dtype: the encoding of bytes depends on their dtype


@dataclass(frozen=True)
class Piece:
    """A part of a box, in the order of its bytes."""

    box: int
    start: int  # bytes into the box
    data: memoryview
    content: Content
    form: Form
    digests: bytes = b""  # digests of its tiles, where it has several
    apart: bool = False  # separate from the piece before it: a run must not continue here


@dataclass(frozen=True)
class Laid:
    """A piece as it is stored: bytes of a pack, or a part of a run of several pieces."""

    stored: Stored
    run: int = 0  # rows of the run that begins with it
    row: int = 0  # first row in its run


def hashed(number: int, box: TensorBox) -> list[Piece]:
    """The pieces of a box, which is number `number` of a writer, with their digests."""
    data, ends, widths = as_bytes(box.data), cuts_of(box), _widths(box)
    pieces, was_inside = [], False
    for low, high in zip([0, *ends[:-1]], ends, strict=True):
        part, form = data[low:high], Form((high - low) // sum(widths), widths)
        first, is_inside = _edges_in(box, low // sum(widths), form)
        pieces.append(Piece(number, low, part, (b"", box.dtype_name), form, apart=first or is_inside or was_inside))
        was_inside = is_inside
    return [piece for run in _runs(pieces) for piece in _digested(run)]


def _edges_in(box: TensorBox, row: int, form: Form) -> tuple[bool, bool]:
    """Whether equal parts of the tensor's rows begin at the start of a piece, and whether they begin inside it. A
    reader of such a part needs whole runs, or the whole piece."""
    if not form.table:
        return False, False
    axis, _ = grid(box.global_shape, box.data.element_size())
    low = box.offset[axis] + row % box.data.shape[axis]
    cut = edges(box.global_shape[axis], WAYS_MASK)
    at = bisect_left(cut, low)
    first = at < len(cut) and cut[at] == low
    return first, bisect_left(cut, low + form.height) > at + first


def groups_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in their order, grouped into packs of about PACK_BYTES."""
    groups: list[list[Piece]] = []
    size = PACK_BYTES
    for piece in pieces:
        if size + len(piece.data) > PACK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece.data)
    return groups


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces of several bands in one box, RUN_BYTES at most; other pieces alone."""
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        follows = run and run[-1].box == piece.box and run[-1].start + len(run[-1].data) == piece.start
        follows = follows and not piece.apart
        if not (follows and piece.form.table and size + len(piece.data) <= RUN_BYTES):
            if run:
                yield run
            run, size = [], 0
        run.append(piece)
        size += len(piece.data)
    if run:
        yield run


def _band_after_band(run: Sequence[Piece]) -> memoryview:
    """The bytes of a run as they are stored."""
    widths, row = run[0].form.widths, 0
    height = sum(piece.form.height for piece in run)
    tiles = np.empty(height * sum(widths), dtype=np.uint8)
    for piece in run:
        rows = np.frombuffer(piece.data, dtype=np.uint8).reshape(piece.form.height, -1)
        tiled(rows, widths, tiles, row, height)
        row += piece.form.height
    return tiles.data


def _digested(run: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of a run with their digests."""
    if not run[0].form.table:
        yield from (replace(piece, content=(blake3(piece.data).digest(16), piece.content[1])) for piece in run)
        return
    tiles, row = _band_after_band(run), 0
    height = sum(piece.form.height for piece in run)
    for piece in run:
        digests = tile_digests(tiles_of(tiles, height, row, piece.form))
        content = digest_of_tiles(digests, piece.form), piece.content[1]
        yield replace(piece, content=content, digests=digests)
        row += piece.form.height


def laid_out(pieces: Sequence[Piece]) -> list[Laid]:
    """The pieces as they are stored without compression."""
    return [stored for run in _runs(pieces) for stored in _tiled(run)]


def _tiled(run: Sequence[Piece]) -> Iterator[Laid]:
    """The stored form of a run: all of its bytes with the first piece."""
    if not run[0].form.table:
        yield from (Laid(Stored(piece.data, Codec.RAW, None)) for piece in run)
        return
    height, row = sum(piece.form.height for piece in run), 0
    for piece in run:
        data = b"" if row else _band_after_band(run)
        yield Laid(Stored(data, Codec.TILED, None), 0 if row else height, row)
        row += piece.form.height


def is_tiled(stored: Stored) -> bool:
    return stored.codec == Codec.TILED


def places_in(pack: PackName, start: int, pieces: Sequence[Piece], laid: Sequence[Laid]) -> dict[Content, Place]:
    """The places of pieces in a pack, whose first bytes up to `start` are digests of tiles."""
    places: dict[Content, Place] = {}
    table, run = 0, Run(0, 0)
    for piece, stored_piece in zip(pieces, laid, strict=True):
        digest, stored = piece.content[0], stored_piece.stored
        if is_tiled(stored):
            run = Run(start, stored_piece.run) if stored_piece.run else run
            places[piece.content] = Place(pack, table, stored_piece.row, stored.codec, digest, None, run)
            table += len(piece.digests)
        else:
            places[piece.content] = Place(pack, start, len(stored.data), stored.codec, digest, stored.base)
        start += len(stored.data)
    return places


def named(piece: Piece, laid: Laid) -> bytes:
    """The input of a pack name's digest for a piece: content and encoding. Two packs of one name are equal."""
    base = laid.stored.base.digest if laid.stored.base is not None else b""
    return piece.content[0] + bytes([laid.stored.codec]) + laid.run.to_bytes(8, "little") + base


def cuts_of(box: TensorBox) -> list[int]:
    """The cuts of a box's bytes into the pieces of its tensor's grid: the end of each, in bytes."""
    if not box.data.dim():
        return [box.data.element_size()]
    axis, rows = grid(box.global_shape, box.data.element_size())
    low, size = box.offset[axis], box.data.shape[axis]
    row = prod(box.data.shape[axis + 1 :]) * box.data.element_size()
    ends = [*range((low // rows + 1) * rows - low, size, rows), size]
    outer = prod(box.data.shape[:axis])
    return [(number * size + end) * row for number in range(outer) for end in ends]


def _widths(box: TensorBox) -> tuple[int, ...]:
    """The bands of a box, in bytes."""
    axis, _ = grid(box.global_shape, box.data.element_size())
    ways = ways_of(box.global_shape, axis, box.data.element_size())
    return box_widths(box.offset, tuple(box.data.shape), box.global_shape, axis, ways, box.data.element_size())
