"""Binary indexes: intact or refused with a reason, and fetched only where they may hold relevant pieces."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.checkpoint import Attempt, TensorBox, tiles
from holdfast.checkpoint.catalogue import TensorInfo
from holdfast.checkpoint.index import (
    BOX,
    MAGIC,
    PACK,
    PLACE,
    Boxes,
    Header,
    Index,
    PackName,
    Totals,
    _digest,
    pack_table,
)
from holdfast.checkpoint.reader import fetch_child
from holdfast.checkpoint.root import FORMAT_VERSION, UnfitError
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.checkpoint.tree import Entry, Reach
from holdfast.spec.errors import DataError
from holdfast.store import Store
from tests.checkpoint.saving import RUN, shards, state


@pytest.fixture
def index(folder_store: Store) -> Index:
    """The index of the second of three writers."""
    return ShardWriter(folder_store, Attempt(RUN, 1), 1).write(3, shards(state(3), 1, 3))


def test_an_index_is_read_back_as_it_was_written(index: Index) -> None:
    data = index.to_bytes()
    back = Index.from_bytes(data, "i")
    assert back.to_bytes() == data
    assert back.header == index.header
    assert back.catalogue == index.catalogue
    assert [back.place(number) for number in range(len(back.places))] == [place for _, place in index.known()]


def test_no_changed_byte_of_an_index_passes(index: Index) -> None:
    intact = index.to_bytes()
    for place in range(len(intact)):
        damaged = bytearray(intact)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DataError) as error:
            Index.from_bytes(bytes(damaged), "the-key")
        assert not isinstance(error.value, UnfitError)


def test_no_shortened_index_passes(index: Index) -> None:
    intact = index.to_bytes()
    for length in range(len(intact)):
        with pytest.raises(DataError, match=r"^the-key: "):
            Index.from_bytes(intact[:length], "the-key")


def test_an_index_that_its_parent_does_not_know_is_refused(index: Index) -> None:
    with pytest.raises(DataError, match="does not match its digest"):
        Index.from_bytes(index.to_bytes(), "i", "0" * 32)


def test_an_index_of_a_newer_format_requires_an_upgrade(index: Index) -> None:
    rest = index.to_bytes()[32:]
    newer = MAGIC + _digest(FORMAT_VERSION + 1, 1, rest) + (FORMAT_VERSION + 1).to_bytes(4, "little")
    with pytest.raises(UnfitError, match="format version 3 is newer than 2; upgrade"):
        Index.from_bytes(newer + (1).to_bytes(4, "little") + rest, "i")


def _places(**values: int) -> Callable[[Index], Index]:
    def changed(index: Index) -> Index:
        places = index.places.copy()
        for name, value in values.items():
            places[name][0] = value
        return replace(index, places=places)

    return changed


def _boxes(column: str, value: int) -> Callable[[Index], Index]:
    def changed(index: Index) -> Index:
        parts = {name: getattr(index.boxes, name).copy() for name in ("table", "offset", "shape")}
        (parts["table"][column] if column in ("tensor", "axis", "ways", "rows") else parts[column])[0] = value
        return replace(index, boxes=type(index.boxes)(**parts))

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_places(pack=9), "in no pack"),
        (_places(start=10**6), "outside of its pack"),
        (_places(start=2**64 - 8), "outside of its pack"),
        (_places(length=2**32 - 1), "outside of its pack"),
        (_places(base=0), "refers to no base"),
        (_places(base=-2), "refers to no base"),
        (_boxes("tensor", 99), "of no tensor"),
        (_boxes("axis", 2), "on no grid"),
        (_boxes("rows", 0), "on no grid"),
        (_boxes("ways", 0), "into no bands"),
        (_boxes("rows", 2**63), "on no grid"),
        (_boxes("offset", -1), "outside of its tensor"),
        (_boxes("offset", 2**62), "outside of its tensor"),
        (_boxes("shape", 0), "outside of its tensor"),
        (_boxes("shape", 2**62), "outside of its tensor"),
        (lambda index: replace(index, places=index.places[1:]), "places for"),
        (lambda index: replace(index, places=np.repeat(index.places, 2)), "places for"),
    ],
)
def test_lying_numbers_are_refused(index: Index, change: Callable[[Index], Index], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Index.from_bytes(change(index).to_bytes(), "i")


def test_two_boxes_that_disagree_about_a_tensor_are_refused(folder_store: Store) -> None:
    boxes = [TensorBox.whole("a", torch.ones(2)), TensorBox("a", (4,), (2,), torch.ones(2))]
    with pytest.raises(DataError, match=r"holds a as float32 \[2\], another as float32 \[4\]|float32 \[4\], another"):
        ShardWriter(folder_store, Attempt(RUN, 1), 0).write(3, boxes)


@pytest.mark.parametrize(
    ("table", "values", "reason"),
    [
        ("places", {"base": 9}, "in no run"),
        ("places", {"base": -1}, "in no run"),
        ("places", {"pack": 9}, "in no pack"),
        ("places", {"start": 2**64 - 8}, "outside of its pack"),
        ("places", {"start": 10**6}, "outside of its pack"),
        ("places", {"length": 99}, "outside of its run"),
        ("runs", {"start": 10**6}, "outside of its pack"),
        ("runs", {"start": 2**64 - 8}, "outside of its pack"),
        ("runs", {"height": 2**32 - 1}, "outside of its pack"),
    ],
)
def test_lying_numbers_of_runs_are_refused(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, table: str, values: dict[str, int], reason: str
) -> None:
    monkeypatch.setattr(tiles, "WIDE_BYTES", 8)
    index = ShardWriter(folder_store, Attempt(RUN, 1), 0).write(3, [TensorBox.whole("t", torch.randn(9, 9))])
    assert len(index.runs) == 1
    assert Index.from_bytes(index.to_bytes(), "i").places_of([0]) == index.places_of([0])
    rows = getattr(index, table).copy()
    for name, value in values.items():
        rows[name][0] = value
    with pytest.raises(DataError, match=reason):
        Index.from_bytes(replace(index, **{table: rows}).to_bytes(), "i")


def hostile(rows: int, shape: tuple[int, ...], boxes: int, length: int) -> bytes:
    """An index from an attacker: `boxes` tensors of `shape`, cut at every `rows`, and at most one place."""
    table, depth = np.zeros(boxes, dtype=BOX), len(shape)
    table["tensor"], table["ways"], table["rows"] = np.arange(boxes), 1, rows
    cut = Boxes(table, np.zeros((boxes, depth), dtype=np.int64), np.tile(np.array(shape, dtype=np.int64), (boxes, 1)))
    place = np.zeros(1 if length else 0, dtype=PLACE)
    place["codec"], place["length"], place["base"] = 1, length, -1
    packs = pack_table([PackName(1, 1, bytes(16), 1 << 40)]) if length else np.zeros(0, dtype=PACK)
    infos = {f"t{number:04d}": TensorInfo(shape, "float32") for number in range(boxes)}
    return Index(Header(1, 1, 0, 0, Totals()), infos, packs, cut, place).to_bytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (hostile(1 << 29, (1 << 29,), 1, 100), "a piece of more than"),  # 2 GiB of zeros, in 27 kB
        (hostile(1, (4, 1 << 40), 1, 100), "a piece of more than"),
        (hostile(64, (64,), 1, (1 << 32) - 1), "larger than any piece"),
        (hostile(1, (1 << 56,), 256, 0), "0 places for about"),  # 256 x 2^56 is 0 modulo 2^64
        (hostile(1, (1 << 32, 1 << 32), 1, 0), "too many elements"),
    ],
    ids=["one piece", "one row", "stored", "wraps around", "wraps around within"],
)
def test_sizes_that_an_index_claims_are_compared_before_a_buffer_is_made(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Index.from_bytes(data, "the-key")


def test_an_index_larger_than_its_entry_is_not_read(folder_store: Store) -> None:
    entry = Entry(
        name="000001-000000001/00000.idx", size=100, digest="0" * 32, fresh=0, reach=Reach(tensors="00", spans=())
    )
    folder_store.put("i", bytes(101))
    with pytest.raises(DataError, match="has 101 bytes, and at most 100 are read"):
        fetch_child(folder_store, "i", entry)
