"""Pieces cut into bands of columns: any boxes load from any boxes, with little read overhead."""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.counting import CountingStore
from holdfast.checkpoint import Attempt, TensorBox, open_checkpoint, packing, tiles
from holdfast.checkpoint import box as box_module
from holdfast.checkpoint import reader as reader_module
from holdfast.checkpoint.codec import Codec
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.compress import Compression
from holdfast.checkpoint.damage_reports import DamageError
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.store import Store, layout, open_store
from tests.checkpoint.saving import RUN, blank, same, whole

FIELDS = {"dataset_id": "d", "layout": {}, "random": {}}
SMALL = {"PIECE_BYTES": 96, "WIDE_BYTES": 8, "RUN_BYTES": 200, "READ_BYTES": 300}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set pieces to a few elements."""
    for module, name in product((box_module, tiles, packing, reader_module), SMALL):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, SMALL[name])


def saved(store: Store, *boxes: list[TensorBox], compression: Compression | None = None) -> None:
    """Save a checkpoint with one writer for each list of boxes."""
    for writer, written in enumerate(boxes):
        ShardWriter(store, Attempt(RUN, 1), writer, compression=compression).write(1, written)
    Committer(store, Attempt(RUN, 1), len(boxes)).commit(1, FIELDS, {})


def cells(tensor: torch.Tensor, cuts: list[set[int]]) -> Iterator[TensorBox]:
    """A tensor in boxes, cut along each axis."""
    spans = []
    for size, inside in zip(tensor.shape, cuts, strict=True):
        ends = sorted({0, size, *(cut for cut in inside if cut < size)})
        spans.append(list(pairwise(ends)))
    for cell in product(*spans):
        part = tensor[tuple(slice(low, high) for low, high in cell)].contiguous()
        yield TensorBox("t", tuple(tensor.shape), tuple(low for low, _ in cell), part)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=3), st.sampled_from([torch.float32, torch.bfloat16]), st.data()
)
@settings(max_examples=60)
def test_any_boxes_are_filled_from_any_boxes(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    cuts = [[data.draw(st.sets(st.integers(1, 13), max_size=3)) for _ in shape] for _ in range(2)]
    tensor = torch.randint(0, 3, (prod(shape),)).to(dtype).view(shape)  # repeated content
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        for module, name in product((box_module, tiles, packing, reader_module), SMALL):
            if hasattr(module, name):
                patch.setattr(module, name, SMALL[name])
        store = open_store(Path(folder).as_uri())
        boxes = list(cells(tensor, cuts[0]))
        saved(store, boxes[::2], boxes[1::2] or [])
        expected = list(cells(tensor, cuts[1]))
        for subset in (expected, *([box] for box in expected)):
            loaded = blank(subset)
            open_checkpoint(store, RUN, 1).fill(loaded)
            assert same(loaded, subset)


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_reader_of_some_rows_or_columns_reads_only_these(folder_store: Store, readers: int, axis: int) -> None:
    tensor = torch.randn(1536, 1000)
    saved(folder_store, whole({"t": tensor}))
    counting = CountingStore(folder_store)
    overhead = 0
    lows = range(0, tensor.shape[axis], -(-tensor.shape[axis] // readers))
    for part, low in zip(tensor.chunk(readers, axis), lows, strict=True):
        box = TensorBox("t", (1536, 1000), (low, 0) if axis == 0 else (0, low), torch.empty(part.shape))
        checkpoint = open_checkpoint(counting, RUN, 1)
        for _ in checkpoint.leaves():
            pass
        before = counting.read, counting.requests
        checkpoint.fill([box])
        assert torch.equal(box.data, part)
        overhead += counting.read - before[0] - part.nbytes
        assert counting.requests - before[1] <= 30
    assert overhead <= (0.02 * tensor.nbytes if axis else readers * 2**18)  # a piece that two readers need


@pytest.mark.usefixtures("small")
def test_content_has_one_digest_however_it_is_stored(folder_store: Store) -> None:
    """Therefore switching compression on or off writes nothing again."""
    tensors = {"t": torch.arange(400, dtype=torch.float32).view(20, 20)}
    plain = ShardWriter(folder_store, Attempt(RUN, 1), 0)
    index = plain.write(1, whole(tensors))
    assert set(index.places["codec"].tolist()) == {Codec.TILED}
    squeezed = ShardWriter(folder_store, Attempt(RUN, 2), 0, compression=Compression())
    other = squeezed.write(1, whole(tensors))
    assert set(other.places["codec"].tolist()) <= {Codec.RAW, Codec.NUMBERS}
    assert other.places["digest"].tolist() == index.places["digest"].tolist()
    squeezed.adopt([index])
    assert squeezed.write(2, whole(tensors)).header.totals.fresh == 0
    plain.adopt([other])
    assert plain.write(2, whole(tensors)).header.totals.fresh == 0


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_every_byte_of_a_pack_of_tiles_is_checked_by_readers_of_rows_and_by_those_of_columns(
    folder_store: Store,
) -> None:
    tensor = torch.randn(4, 8)
    saved(folder_store, whole({"t": tensor}))
    (key,) = (info.key for info in folder_store.list(layout.packs(RUN)))
    path = folder_store.local_path(key)
    assert path is not None
    intact = path.read_bytes()
    assert len(intact) > tensor.nbytes
    rows = [TensorBox.whole("t", torch.empty(4, 8))]
    columns = [TensorBox("t", (4, 8), (0, low), torch.empty(4, 2)) for low in range(0, 8, 2)]
    for place in range(len(intact)):
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << place % 8]) + intact[place + 1 :])
        with pytest.raises(DamageError, match="fail their checksum"):
            open_checkpoint(folder_store, RUN, 1).fill(rows)
        failed = 0
        for box in columns:
            try:
                open_checkpoint(folder_store, RUN, 1).fill([box])
            except DamageError:
                failed += 1
            else:
                assert torch.equal(box.data, tensor[:, box.offset[1] : box.offset[1] + 2])
        assert failed, place


@pytest.mark.usefixtures("small")
def test_pieces_with_the_same_tiles_in_other_rows_are_not_confused(folder_store: Store) -> None:
    two_rows = torch.randn(4, 6, 2)  # in a piece of 96 bytes
    one_row = two_rows.view(2, 2, 6, 2).permute(0, 2, 1, 3).reshape(2, 6, 4)
    tensors = {"two": two_rows, "one": one_row}
    saved(folder_store, whole(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(open_checkpoint(folder_store, RUN, 1).tensor(name), tensor)


def test_bands_are_cut_where_equal_parts_of_the_columns_begin() -> None:
    ways = tiles.ways_of((100, 24000), 0, 4)
    assert tiles.edges(24, ways) == (0, 3, 4, 6, 8, 9, 12, 15, 16, 18, 20, 21, 24)
    assert tiles.edges(24, 1) == (0, 24)
    assert tiles.ways_of((100, 200), 0, 4) == 1  # the rows are too short to split
    assert tiles.ways_of((100,), 0, 4) == 1
    assert tiles.box_widths((0, 5, 0), (1, 10, 7), (8, 24, 7), 0, ways, 2) == (14, 28, 14, 42, 42)
