"""Attention of whole rows inside a compiled layer: torch's `flex_attention`, which is compiled with the layer.

A row of one document needs no bounds. A program of the kernel computes a block of one row and head, and does not see
the other rows. Forward and backward have sums in one fixed order. The kernels' blocks are those of torch's table for
the device, never chosen by timing. On an H200 they take 0.79 ms for 4 rows of 2,048 tokens and 16 heads of width 128,
and the flash kernel takes 1.05 ms with either backward.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast.model.attention.segments import Segments
from holdfast.spec.model import WHOLE_ROW

BLOCK = 128  # positions of a block of the mask
HOPPER = (9, 0)  # CUDA's number of it
WIDTHS = (64, 128)  # of a head, for which torch has measured blocks
# Each query sees a key, itself, and the blocks that a query reads are consecutive. With a window they would not be.
OPTIONS = {"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True}


def prepare_rows(segments: Segments, device: torch.device) -> None:
    """Give segments that are whole, long rows the mask of compiled layers without a window. NVIDIA's devices before
    Hopper keep the flash kernel, which was made for them, and so do AMD's, on which this one was not tried."""
    length = segments.row
    if device.type != "cuda" or length is None or length < WHOLE_ROW or length % BLOCK:
        return
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER:
        segments.row_mask = row_mask(length, device)


def row_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: Any, scale: float) -> Tensor:  # noqa: N803
    """The output [B, H, T, K] with the mask of the rows. To be called inside a compiled layer."""
    from torch.nn.attention.flex_attention import flex_attention

    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    options: Any = OPTIONS
    out = flex_attention(q_BHTK, k_BGTK, v_BGTK, None, mask, scale, grouped, kernel_options=options)
    assert isinstance(out, Tensor)  # without its sums, which were not asked for
    return out


@cache
def row_mask(length: int, device: torch.device) -> Any:
    """The blocks of keys that a block of queries reads: `torch.nn.attention.flex_attention.BlockMask`.

    Block i reads a part of block i, and all of the blocks before it. torch's `create_block_mask` finds this out with
    a mask of length x length.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    blocks = torch.arange(length // BLOCK, dtype=torch.int32, device=device)
    partial, whole = torch.ones_like(blocks), blocks  # how many of each
    diagonal_first, in_order = (blocks[:, None] + blocks) % len(blocks), blocks.expand(len(blocks), -1).contiguous()
    return BlockMask.from_kv_blocks(
        partial[None, None],
        diagonal_first[None, None],
        whole[None, None],
        in_order[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(length, length),
    )
