"""Attention in tiles of a fixed order (CPU; fp32 on CUDA; other devices).

A document that fits into the window is one causal tile. Any other is cut into blocks of 256 queries with a band mask.
Where torch has no kernel that never stores scores, all are cut, and the scores of a block are computed by products.
The bits of a document depend on nothing outside it. Its offset, the batch, the split of the heads and the number of
threads do not matter.
"""

# ruff: noqa: N803 - shape suffixes are upper case
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.model.attention.kernel import AttentionPattern, BackwardInputs, deterministic_backward

BLOCK = 256  # queries of a tile with a band mask; part of the order of sums

aten = torch.ops.aten


def _tiles(
    pattern: AttentionPattern, length: int, keys: int, whole: bool
) -> Iterator[tuple[int, slice, int, slice, int | None]]:
    """Row and positions of the queries, and of the keys, of each tile in order. Last, how many positions the first
    query lies behind the first key; None if the tile is causal and square, which `whole` allows."""
    window = pattern.window
    for q, q_count, k, k_count in pattern.segments.each():
        if q_count == 0:
            continue
        q_row, q_start = divmod(q, length)
        k_row, k_start = divmod(k, keys)
        if whole and q_count == k_count and (window is None or k_count <= window):
            yield q_row, slice(q_start, q_start + q_count), k_row, slice(k_start, k_start + k_count), None
            continue
        ahead = k_count - q_count
        for start in range(0, q_count, BLOCK):
            end = min(start + BLOCK, q_count)
            lowest = 0 if window is None else max(0, ahead + start - window + 1)
            yield (
                q_row,
                slice(q_start + start, q_start + end),
                k_row,
                slice(k_start + lowest, k_start + ahead + end),
                ahead + start - lowest,
            )


def _tile_mask(queries: int, keys: int, ahead: int, window: int | None, like: Tensor) -> Tensor:
    """The additive mask of a tile, [1, H, queries, keys]. Its first query is `ahead` of its first key.

    The memory-efficient kernel of CUDA takes a bias of exactly this shape. Its last dimension must be contiguous, and
    its other strides multiples of 8, as in torch's `preprocess_mask` (aten/native/transformers/attention.cpp). All
    heads share the same numbers.
    """
    padded = -(-keys // 8) * 8
    back = torch.arange(ahead, ahead + queries, device=like.device)[:, None] - torch.arange(padded, device=like.device)
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -math.inf)
    return mask[None, None, :, :keys].expand(1, like.shape[1], queries, keys)


class _TileMasks:
    """Masks of tiles. Blocks inside a long document have one and the same."""

    def __init__(self, window: int | None, like: Tensor) -> None:
        self._window, self._like = window, like
        self._shape: tuple[int, int, int] | None = None
        self._mask: Tensor | None = None

    def of(self, queries: int, keys: int, ahead: int | None) -> Tensor | None:
        """The mask of a tile. None if it is causal and square."""
        if ahead is None:
            return None
        if self._shape != (queries, keys, ahead):
            self._shape = queries, keys, ahead
            self._mask = _tile_mask(queries, keys, ahead, self._window, self._like)
        return self._mask


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
    """See `Kernel.forward`."""
    batch, heads, length, width = q.shape
    out = q.new_empty(batch, length, heads, width).transpose(1, 2)
    lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    masks = _TileMasks(pattern.window, q)
    for row, queries, k_row, keys, ahead in _tiles(pattern, length, k.shape[2], _is_fused(q)):
        tile = q[row, None, :, queries], _keys_of(k, q, k_row, keys), _keys_of(v, q, k_row, keys)
        mask = masks.of(tile[0].shape[2], tile[1].shape[2], ahead)
        if not _is_fused(q):
            result = _plain_forward(*tile, mask, pattern.scale)
        elif q.is_cuda:
            result = aten._scaled_dot_product_efficient_attention(
                *tile, mask, True, 0.0, mask is None, scale=pattern.scale
            )
        else:
            result = aten._scaled_dot_product_flash_attention_for_cpu(
                *tile, 0.0, mask is None, attn_mask=mask, scale=pattern.scale
            )
        out[row, :, queries] = result[0][0]
        lse[row, :, queries] = result[1][0, :, : tile[0].shape[2]]  # CUDA pads it
    return out, lse


def backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernel.backward`."""
    gradient, q, k, v, out, lse, pattern = inputs
    length, groups = q.shape[2], k.shape[1]
    d_q = torch.empty_like(q)
    d_k, d_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    masks = _TileMasks(pattern.window, q)
    for row, queries, k_row, keys, ahead in _tiles(pattern, length, k.shape[2], _is_fused(q)):
        gradient_part, out_part = gradient[row, None, :, queries].contiguous(), out[row, None, :, queries]
        tile = q[row, None, :, queries], _keys_of(k, q, k_row, keys), _keys_of(v, q, k_row, keys)
        tile_lse = lse[row, None, :, queries]
        mask = masks.of(tile[0].shape[2], tile[1].shape[2], ahead)
        if not _is_fused(q):
            result = _plain_backward(gradient_part, *tile, mask, out_part, tile_lse, pattern.scale)
        elif q.is_cuda:
            tile_lse = F.pad(tile_lse, (0, -tile_lse.shape[2] % 32), value=math.inf)
            unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout
            with deterministic_backward():
                result = aten._scaled_dot_product_efficient_attention_backward(
                    gradient_part,
                    *tile,
                    mask,
                    out_part,
                    tile_lse,
                    unused,
                    unused,
                    0.0,
                    [True, True, True, False],
                    mask is None,
                    scale=pattern.scale,
                )
        else:
            tile_lse = tile_lse.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel's own layout
            result = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient_part, *tile, out_part, tile_lse, 0.0, mask is None, attn_mask=mask, scale=pattern.scale
            )
        d_q[row, :, queries] = result[0][0]
        for total, part in ((d_k, result[1]), (d_v, result[2])):
            for head_part in part[0].unflatten(0, (groups, -1)).unbind(1):
                total[k_row, :, keys] += head_part
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def _is_fused(q: Tensor) -> bool:
    """Whether torch has a kernel that never stores the scores of a tile. (The meta device has the CPU's.)"""
    return q.device.type in ("cpu", "meta") or (q.is_cuda and q.dtype != torch.float64)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse of a tile, from its scores."""
    scores = _scores(q, k, mask, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(v.dtype) @ v, lse


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, keys and values of a tile."""
    weights = (_scores(q, k, mask, scale) - lse[..., None]).exp_()
    delta = (gradient.to(lse.dtype) * out).sum(-1, keepdim=True)
    d_scores = (weights * ((gradient @ v.transpose(-1, -2)).to(lse.dtype) - delta) * scale).to(q.dtype)
    d_k, d_v = d_scores.transpose(-1, -2) @ q, weights.to(q.dtype).transpose(-1, -2) @ gradient
    return d_scores @ k, d_k, d_v


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return scores if mask is None else scores + mask


def _keys_of(x_BGSK: Tensor, q: Tensor, row: int, positions: slice) -> Tensor:
    """Keys or values of a tile, [1, G, positions, K]. Kernels other than that of the CPU need them for every head."""
    tile = x_BGSK[row, None, :, positions]
    takes_groups = _is_fused(q) and not q.is_cuda
    return tile if takes_groups else tile.repeat_interleave(q.shape[1] // tile.shape[1], dim=1)
