"""Boxes: what overlaps, and how a box is cut."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.components.checkpoint import TensorBox
from holdfast.components.checkpoint import box as box_module
from holdfast.components.checkpoint.box import as_bytes, overlap

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
    whole, one, other = case
    index = np.arange(prod(whole)).reshape(whole)
    mine = index[tuple(slice(low, low + size) for low, size in zip(*one, strict=True))]
    theirs = index[tuple(slice(low, low + size) for low, size in zip(*other, strict=True))]
    both = filled(whole, one) & filled(whole, other)
    met = overlap(*one, *other)
    if met is None:
        assert not both.any()
    else:
        assert np.array_equal(mine[met[0]], theirs[met[1]])
        assert np.array_equal(np.sort(mine[met[0]].ravel()), index[both])


@given(
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    st.integers(1, 64),
)
@settings(deadline=None)
def test_pieces_are_the_box_row_by_row_and_none_is_larger_than_allowed(
    shape: list[int], dtype: torch.dtype, limit: int
) -> None:
    data = torch.arange(prod(shape)).to(dtype).view(shape)
    offset = tuple(range(len(shape)))
    whole = tuple(low + size for low, size in zip(offset, shape, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_module, "PIECE_BYTES", limit)
        pieces = list(TensorBox("t", whole, offset, data).pieces())
    assert b"".join(as_bytes(piece.data) for piece in pieces) == bytes(as_bytes(data))
    row = prod(shape[1:]) * data.element_size()
    assert all(len(as_bytes(piece.data)) <= max(limit, row) for piece in pieces)
    start = offset[0] if shape else 0
    for piece in pieces:
        if shape and data.numel():
            assert piece.offset == (start, *offset[1:])
            start += piece.data.shape[0]


def test_an_empty_tensor_is_one_piece_and_an_empty_part_of_one_none() -> None:
    assert [piece.data.shape for piece in TensorBox.whole("t", torch.empty(0, 4)).pieces()] == [(0, 4)]
    assert list(TensorBox("t", (4, 4), (4, 0), torch.empty(0, 4)).pieces()) == []
