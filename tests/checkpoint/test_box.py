"""Boxes: their overlaps, and how a box is cut."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import TensorBox
from holdfast.checkpoint import box as box_module
from holdfast.checkpoint.box import as_bytes, grid, overlap
from holdfast.checkpoint.packing import cuts_of
from holdfast.checkpoint.pieces import pieces_of

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Rectangle, Rectangle]:
    whole = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))

    def box() -> Rectangle:
        offset = tuple(draw(st.integers(0, size)) for size in whole)
        return offset, tuple(draw(st.integers(0, size - low)) for low, size in zip(offset, whole, strict=True))

    return whole, box(), box()


def filled(whole: tuple[int, ...], box: Rectangle) -> np.ndarray:
    mask = np.zeros(whole, dtype=bool)
    mask[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))] = True
    return mask


@given(two_boxes())
def test_an_overlap_is_exactly_the_elements_that_both_boxes_hold(
    case: tuple[tuple[int, ...], Rectangle, Rectangle],
) -> None:
    whole, first, second = case
    index = np.arange(prod(whole)).reshape(whole)
    first_ids = index[tuple(slice(low, low + size) for low, size in zip(*first, strict=True))]
    second_ids = index[tuple(slice(low, low + size) for low, size in zip(*second, strict=True))]
    common = filled(whole, first) & filled(whole, second)
    met = overlap(*first, *second)
    if met is None:
        assert not common.any()
    else:
        assert np.array_equal(first_ids[met[0]], second_ids[met[1]])
        assert np.array_equal(np.sort(first_ids[met[0]].ravel()), index[common])


@given(
    st.lists(st.integers(1, 9), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.integers(8, 64),
    st.data(),
)
def test_the_pieces_of_any_cut_are_its_bytes_in_order_and_cut_where_the_whole_tensor_is(
    shape: list[int], dtype: torch.dtype, limit: int, data: st.DataObject
) -> None:
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    size = [data.draw(st.integers(1, whole - start)) for start, whole in zip(low, shape, strict=True)]
    content = torch.arange(prod(shape)).to(dtype).view(shape)
    part = content[tuple(slice(start, start + count) for start, count in zip(low, size, strict=True))].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_module, "PIECE_BYTES", limit)
        axis, rows = grid(tuple(shape), part.element_size())
        ends = cuts_of(TensorBox("t", tuple(shape), tuple(low), part))
    raw = bytes(as_bytes(part))
    everything = tuple(slice(0, count) for count in size)
    pieces = list(pieces_of(tuple(low), tuple(size), axis, rows, everything))
    assert [number for number, _, _ in pieces] == list(range(len(ends)))
    assert ends[-1] == len(raw)
    for (_, offset, sizes), begin, end in zip(pieces, [0, *ends], ends, strict=False):
        region = tuple(slice(start, start + count) for start, count in zip(offset, sizes, strict=True))
        assert bytes(as_bytes(content[region])) == raw[begin:end]
        assert end - begin <= limit
        if shape:  # within one cell of the grid of the whole tensor
            assert offset[axis] // rows == (offset[axis] + sizes[axis] - 1) // rows
            assert all(count == 1 for count in sizes[:axis])


def test_the_grid_depends_on_the_global_tensor_only() -> None:
    assert grid((128256, 8192), 4) == (0, 8)
    assert grid((8192, 28672), 2) == (0, 4)
    assert grid((8, 28672, 4096), 4) == (1, 16)  # a row of an expert's weights is too large for a piece
    assert grid((8192,), 4) == (0, 65536)
    assert grid((), 4) == (0, 1)
