"""Validation of an index before any use: nothing in it points outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.catalogue import TensorInfo
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.tiles import Form

if TYPE_CHECKING:
    from holdfast.checkpoint.index import Index

NO_BASE = -1
MOST_PIECE_BYTES = 64 * 2**20  # writers cut at 256 KiB; a reader allocates a piece before it knows its digest
Array = NDArray[Any]


def validate_index(index: Index) -> None:
    """Raises ValueError for an entry that points outside of a tensor, a pack or a table."""
    infos, table, dimensions = list(index.catalogue.values()), index.boxes.table, index.boxes.offset.shape[1]
    if len(table):
        if int(table["tensor"].max()) >= len(infos):
            raise ValueError("a box of no tensor")
        shapes = np.ones((len(infos), dimensions), dtype=np.int64)
        depth = np.array([len(info.shape) for info in infos])
        if int(depth[table["tensor"]].max(initial=0)) > dimensions:
            raise ValueError("a box has fewer dimensions than its tensor")
        for number, info in enumerate(infos):
            shapes[number, : len(info.shape)] = info.shape[:dimensions]
        low, size = index.boxes.offset, index.boxes.shape
        if (low < 0).any() or (size <= 0).any() or (low > shapes[table["tensor"]] - size).any():
            raise ValueError("a box lies outside of its tensor")
        if (table["axis"] >= np.maximum(depth[table["tensor"]], 1)).any() or (table["rows"] < 1).any():
            raise ValueError("a box is cut on no grid")
        if (table["rows"] > 1 << 60).any():
            raise ValueError("a box is cut on no grid")
        if ((table["ways"] & 1 == 0) | ((table["ways"] > 1) & (table["axis"] + 1 >= depth[table["tensor"]]))).any():
            raise ValueError("a box is cut into no bands")
        _require_bounded(index, infos)
    if int(index.boxes.first[-1]) != len(index.places):
        raise ValueError(f"{len(index.places)} places for {int(index.boxes.first[-1])} pieces")
    in_run = index.places["codec"] == Codec.TILED
    for places in (index.places[~in_run], index.bases):
        _require_inside(index, places)
    _require_in_runs(index, infos, in_run)
    base = index.places["base"][~in_run]
    if (base < NO_BASE).any() or (base >= len(index.bases)).any() or (index.bases["base"] != NO_BASE).any():
        raise ValueError("a place refers to no base, or a base to another one")
    if (index.bases["codec"] == Codec.TILED).any():
        raise ValueError("a base lies in a run")


def _require_bounded(index: Index, infos: Sequence[TensorInfo]) -> None:
    """Raises ValueError for pieces that are too large, or more pieces than places. Products use floating-point numbers,
    which do not wrap around as int64 does."""
    table, size, low = index.boxes.table, index.boxes.shape.astype(np.float64), index.boxes.offset.astype(np.float64)
    axis, rows, numbers = table["axis"].astype(np.int64), table["rows"].astype(np.float64), np.arange(len(table))
    item = np.array([info.itemsize for info in infos], dtype=np.float64)[table["tensor"]]
    column = np.arange(size.shape[1])[None, :]
    with np.errstate(over="ignore"):
        inner = np.where(column > axis[:, None], size, 1).prod(axis=1) * item
        outer = np.where(column < axis[:, None], size, 1).prod(axis=1)
        first, last = low[numbers, axis], low[numbers, axis] + size[numbers, axis]
        count = (outer * (np.ceil(last / rows) - np.floor(first / rows))).sum()
    if (np.minimum(rows, size[numbers, axis]) * inner > MOST_PIECE_BYTES).any():
        raise ValueError(f"a piece of more than {MOST_PIECE_BYTES} bytes")
    if count > 2.0 * len(index.places) + 1:  # the exact number is compared next
        raise ValueError(f"{len(index.places)} places for about {count:.0f} pieces")


def _require_in_runs(index: Index, infos: Sequence[TensorInfo], in_run: Array) -> None:
    """The same for places in runs: the digests of their tiles, and the run."""
    places = index.places[in_run]
    if not len(places):
        return
    if (places["base"] < 0).any() or (places["base"] >= len(index.runs)).any():
        raise ValueError("a place in no run")
    if int(places["pack"].max()) >= len(index.packs):
        raise ValueError("a place in no pack")
    run, pack = index.runs[places["base"]], index.packs["size"][places["pack"]].astype(np.int64)
    forms = [Form(1, index.boxes.widths(row, infos)) for row in range(len(index.boxes.table))]
    counts = np.diff(index.boxes.first)
    table, row = (
        np.repeat(np.array(values, dtype=np.int64), counts)[in_run]
        for values in ([form.table for form in forms], [min(form.size, 1 << 28) for form in forms])
    )
    if (table == 0).any():
        raise ValueError("a piece of one band in a run")
    if (places["start"] > 1 << 60).any() or (run["start"] > 1 << 60).any():
        raise ValueError("a run lies outside of its pack")
    ends = run["start"].astype(np.int64) + run["height"].astype(np.int64) * row
    if (ends > pack).any() or (places["start"].astype(np.int64) + table > pack).any():
        raise ValueError("a run lies outside of its pack")
    if (places["length"] >= run["height"]).any():
        raise ValueError("a place lies outside of its run")


def _require_inside(index: Index, places: Array) -> None:
    if not len(places):
        return
    if int(places["pack"].max()) >= len(index.packs):
        raise ValueError("a place in no pack")
    if (places["start"] > 1 << 60).any() or (places["length"] > 2 * MOST_PIECE_BYTES).any():
        raise ValueError("a place lies outside of its pack, or is larger than any piece")
    if (places["start"] + places["length"] > index.packs["size"][places["pack"]]).any():
        raise ValueError("a place lies outside of its pack")
