"""What is checked of an index before anything of it is used: nothing in it points outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdfast.components.checkpoint.catalogue import TensorInfo
from holdfast.components.checkpoint.codec import Codec
from holdfast.components.checkpoint.tiles import Form

if TYPE_CHECKING:
    from holdfast.components.checkpoint.index import Index

NO_BASE = -1
Array = NDArray[Any]


def require_sound(index: Index) -> None:
    """Raises ValueError for what points outside of a tensor, a pack or a table."""
    infos, table, dimensions = list(index.catalogue.values()), index.boxes.table, index.boxes.offset.shape[1]
    if len(table):
        if int(table["tensor"].max()) >= len(infos):
            raise ValueError("a box of no tensor")
        whole = np.ones((len(infos), dimensions), dtype=np.int64)
        depth = np.array([len(info.shape) for info in infos])
        if int(depth[table["tensor"]].max(initial=0)) > dimensions:
            raise ValueError("a box has fewer dimensions than its tensor")
        for number, info in enumerate(infos):
            whole[number, : len(info.shape)] = info.shape[:dimensions]
        low, size = index.boxes.offset, index.boxes.shape
        if (low < 0).any() or (size <= 0).any() or (low > whole[table["tensor"]] - size).any():
            raise ValueError("a box lies outside of its tensor")
        if (table["axis"] >= np.maximum(depth[table["tensor"]], 1)).any() or (table["rows"] < 1).any():
            raise ValueError("a box is cut on no grid")
        if (table["rows"] > 1 << 60).any():
            raise ValueError("a box is cut on no grid")
        if ((table["ways"] & 1 == 0) | ((table["ways"] > 1) & (table["axis"] + 1 >= depth[table["tensor"]]))).any():
            raise ValueError("a box is cut into no bands")
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
        np.repeat(np.array(each, dtype=np.int64), counts)[in_run]
        for each in ([form.table for form in forms], [min(form.size, 1 << 28) for form in forms])
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
    if (places["start"] > 1 << 60).any():
        raise ValueError("a place lies outside of its pack")
    if (places["start"] + places["length"] > index.packs["size"][places["pack"]]).any():
        raise ValueError("a place lies outside of its pack")
