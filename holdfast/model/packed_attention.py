"""Attention inside packed documents, causal: one function for every path of training, without a T x T tensor.

It covers documents, sliding windows, chunks (further borders of segments), attention sinks, grouped heads, and values
of another width than queries. Two ways to compute it:

- Tiles in a fixed order (CPU; fp32 on CUDA). A document that fits into the window is one causal tile. Any other is cut
  into blocks of 256 queries with a band mask. The bits of a document depend on nothing outside it. Its offset, the
  batch, the split of the heads and the number of threads do not matter.
- torch's variable-length flash kernel (bf16 and fp16 on CUDA), with its own deterministic backward.

A sink is one more key without a value. With lse' = log(exp(lse) + exp(sink)), the output is out * exp(lse - lse'). The
kernel's backward, called with that output and lse', gives the exact gradients of q, k and v. torch's own backward of
the variable-length kernel drops the gradient of lse silently, so the gradient of the sink is computed here.

What no kernel computes is refused by name. The math kernel, which needs all scores, is never used.

Shape suffixes: B batch, T tokens, S positions of keys, H query heads, G key/value heads, K width of queries and keys,
V width of values, N segments.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from holdfast.spec.errors import Problem, SpecError

BLOCK = 256  # queries of a tile with a band mask; part of the order of sums
LONG_DOCUMENT = 16384  # tokens from which a document has a separate call of the flash backward (decision 043)
FLASH_WIDTH = 256  # the largest head width of the flash kernel

aten = torch.ops.aten


@dataclass(frozen=True)
class Segments:
    """Where documents lie in the rows of a batch, laid end to end.

    Segment n has the queries [queries[n], queries[n + 1]) of the B x T queries and the keys [keys[n], keys[n + 1]) of
    the B x S keys. The queries are the last positions of the keys (context parallelism has more keys than queries).
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    _on_device: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        lengths = [(q, k) for _, q, _, k in self.each()] if len(self.queries) == len(self.keys) else []
        fit = len(self.queries) == len(self.keys) and all(0 <= q <= k for q, k in lengths)
        if not fit or self.queries[:1] != (0,) or self.keys[:1] != (0,):
            raise ValueError(
                f"segments with the bounds {self.queries} of queries and {self.keys} of keys; "
                "begin both at 0, and give each segment at least as many keys as queries"
            )

    @classmethod
    def of_rows(cls, rows: int, length: int, chunk: int | None = None) -> Segments:
        """Each row is one document, cut into chunks of `chunk` positions if given."""
        starts = [row * length + at for row in range(rows) for at in range(0, length, chunk or length)]
        bounds = (*starts, rows * length)
        return cls(bounds, bounds)

    @classmethod
    def of_documents(cls, document_BT: Tensor, chunk: int | None = None) -> Segments:
        """From the document number of each token, on the CPU (see `decoder.document_ids`). Chunks count from the
        beginning of a document."""
        starts_BT = torch.ones_like(document_BT, dtype=torch.bool)
        starts_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
        edges = [*starts_BT.flatten().nonzero()[:, 0].tolist(), document_BT.numel()]
        cut = [at for start, end in itertools.pairwise(edges) for at in range(start, end, chunk or end)]
        bounds = (*cut, document_BT.numel())
        return cls(bounds, bounds)

    def each(self) -> Iterator[tuple[int, int, int, int]]:
        """First query, number of queries, first key and number of keys of each segment."""
        for index in range(len(self.queries) - 1):
            q, k = self.queries[index], self.keys[index]
            yield q, self.queries[index + 1] - q, k, self.keys[index + 1] - k

    def on(self, device: torch.device, slots: int) -> tuple[Tensor, Tensor]:
        """The bounds of queries and of keys as int32 on a device, with empty segments up to `slots`."""
        if (device, slots) not in self._on_device:
            missing = max(0, slots + 1 - len(self.queries))
            padded = [(*bounds, *(bounds[-1:] * missing)) for bounds in (self.queries, self.keys)]
            first, second = torch.tensor(padded, dtype=torch.int32).to(device).unbind()
            self._on_device[device, slots] = first, second
        return self._on_device[device, slots]


@dataclass(frozen=True)
class AttentionPattern:
    """What is the same for all heads: the segments, the window, and the factor of the scores."""

    segments: Segments
    window: int | None
    scale: float


def packed_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    segments: Segments,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
    **unsupported: float | None,
) -> Tensor:
    """Causal attention inside segments: [B, H, T, V].

    A query sees itself and at most `window - 1` positions before it. `scale` is K ** -0.5 if not given. Raises
    SpecError for what no kernel computes: a `dropout` that is not 0, and a `softcap` that is not None.
    """
    _refuse_unsupported(q_BHTK, k_BGSK, v_BGSV, segments, window, sinks_H, unsupported)
    pattern = AttentionPattern(segments, window, q_BHTK.shape[-1] ** -0.5 if scale is None else scale)
    width, value_width = q_BHTK.shape[-1], v_BGSV.shape[-1]
    common = max(width, value_width)
    if q_BHTK.is_cuda:
        common = -(-common // 8) * 8
    if common != width:
        q_BHTK, k_BGSK = F.pad(q_BHTK, (0, common - width)), F.pad(k_BGSK, (0, common - width))
    if common != value_width:
        v_BGSV = F.pad(v_BGSV, (0, common - value_width))
    out_BHTV: Tensor = _PackedAttention.apply(q_BHTK, k_BGSK, v_BGSV, sinks_H, pattern)
    return out_BHTV[..., :value_width]


class _PackedAttention(torch.autograd.Function):
    """`attention_forward` and `attention_backward`, for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        pattern: AttentionPattern,
    ) -> Tensor:
        """See `attention_forward`."""
        out, lse = attention_forward(q, k, v, sinks, pattern)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.pattern = pattern
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See `attention_backward`."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        input_gradients = attention_backward(gradients[0], q, k, v, sinks, out, lse, ctx.pattern)
        return (*input_gradients, None)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: AttentionPattern
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, K], and lse [B, H, T] in fp32 (fp64 for fp64), both with the sinks. All widths are equal."""
    flash = uses_flash(q)
    out, lse = (_flash_forward if flash else _tiles_forward)(q, k, v, pattern)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = (out * (lse - with_sink).exp_()[..., None]).to(out.dtype)
        lse = with_sink
    return out, lse


def attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    pattern: AttentionPattern,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sinks, from the output and lse of `attention_forward`."""
    d_sinks = None
    if sinks is not None:
        weight = (sinks.to(lse.dtype)[:, None] - lse).exp_()
        delta = (gradient.to(lse.dtype) * out).sum(-1)
        d_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
    backward = _flash_backward if uses_flash(q) else _tiles_backward
    return (*backward(gradient, q, k, v, out, lse, pattern), d_sinks)


def uses_flash(q: Tensor) -> bool:
    """Whether the flash kernel computes it."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


# Tiles


def _tiles(pattern: AttentionPattern, length: int, keys: int) -> Iterator[tuple[int, slice, int, slice, int | None]]:
    """Row and positions of the queries, and of the keys, of each tile in order. Last, how many positions the first
    query lies behind the first key; None if the tile is causal and square."""
    window = pattern.window
    for q, q_count, k, k_count in pattern.segments.each():
        if q_count == 0:
            continue
        q_row, q_start = divmod(q, length)
        k_row, k_start = divmod(k, keys)
        if q_count == k_count and (window is None or k_count <= window):
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


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    out = q.new_empty(batch, length, heads, width).transpose(1, 2)
    lse = q.new_empty(batch, heads, length, dtype=torch.promote_types(q.dtype, torch.float32))
    masks = _TileMasks(pattern.window, q)
    for row, queries, k_row, keys, ahead in _tiles(pattern, length, k.shape[2]):
        tile = q[row, None, :, queries], _for_heads(k, heads, k_row, keys), _for_heads(v, heads, k_row, keys)
        mask = masks.of(tile[0].shape[2], tile[1].shape[2], ahead)
        if q.is_cuda:
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


def _tiles_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: AttentionPattern,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, length, groups = q.shape[1], q.shape[2], k.shape[1]
    d_q = torch.empty_like(q)
    d_k, d_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    masks = _TileMasks(pattern.window, q)
    for row, queries, k_row, keys, ahead in _tiles(pattern, length, k.shape[2]):
        gradient_part, out_part = gradient[row, None, :, queries].contiguous(), out[row, None, :, queries]
        tile = q[row, None, :, queries], _for_heads(k, heads, k_row, keys), _for_heads(v, heads, k_row, keys)
        tile_lse = lse[row, None, :, queries]
        mask = masks.of(tile[0].shape[2], tile[1].shape[2], ahead)
        if q.is_cuda:
            tile_lse = F.pad(tile_lse, (0, -tile_lse.shape[2] % 32), value=math.inf)
            unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout
            with _deterministic():
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
            for head_part in part[0].unflatten(0, (groups, heads // groups)).unbind(1):
                total[k_row, :, keys] += head_part
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def _for_heads(x_BGSK: Tensor, heads: int, row: int, positions: slice) -> Tensor:
    """Keys or values of a tile, for every query head: [1, H, positions, K]."""
    tile = x_BGSK[row, None, :, positions]
    groups = tile.shape[1]
    return tile if groups == heads else tile.repeat_interleave(heads // groups, dim=1)


# Flash


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
    batch, _heads, length, _ = q.shape
    q_bounds, k_bounds = pattern.segments.on(q.device, _slots(q))
    more = {"num_splits": 1} if _takes_num_splits() else {}
    # Older versions have no such argument. Their kernel splits keys only for a cache in pages.
    result = aten._flash_attention_forward(
        _flat(q),
        _flat(k),
        _flat(v),
        q_bounds,
        k_bounds,
        *_longest(pattern.segments, pattern.window),
        0.0,
        pattern.window is None,
        False,
        scale=pattern.scale,
        **_window(pattern.window),
        **more,
    )
    out = result[0].unflatten(0, (batch, length)).transpose(1, 2)
    return out, result[1].unflatten(1, (batch, length)).transpose(0, 1)


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pattern: AttentionPattern,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
    flat = [_flat(tensor) for tensor in (gradient, q, k, v, out)]
    flat_lse = lse.transpose(0, 1).flatten(1)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
    parts: list[tuple[Tensor, ...]] = []
    for part, first_q, end_q, first_k, end_k in _backward_calls(pattern.segments):
        own, theirs = slice(first_q, end_q), slice(first_k, end_k)
        d_out, x_q, x_k, x_v, x_out = (
            flat[0][own],
            flat[1][own],
            flat[2][theirs],
            flat[3][theirs],
            flat[4][own],
        )
        alone = len(part.queries) == 2 and part.keys[-1] >= LONG_DOCUMENT
        q_bounds, k_bounds = part.on(q.device, 1 if alone else _slots(q))
        with _deterministic():
            result = aten._flash_attention_backward(
                d_out,
                x_q,
                x_k,
                x_v,
                x_out,
                flat_lse[:, own].contiguous(),
                q_bounds,
                k_bounds,
                *_longest(part, pattern.window),
                0.0,
                pattern.window is None,
                unused,
                unused[:0],
                scale=pattern.scale,
                **_window(pattern.window),
            )
        for _, q_count, k_start, k_count in part.each():
            if q_count == 0 and k_count:  # keys that nothing sees, which the kernel leaves out
                result[1][k_start : k_start + k_count] = 0
                result[2][k_start : k_start + k_count] = 0
        parts.append(result)
    d_q, d_k, d_v = (pieces[0] if len(pieces) == 1 else torch.cat(pieces) for pieces in zip(*parts, strict=True))
    d_k, d_v = (tensor.unflatten(0, (batch, keys)).transpose(1, 2) for tensor in (d_k, d_v))
    return d_q.unflatten(0, (batch, length)).transpose(1, 2), d_k, d_v


def _backward_calls(segments: Segments) -> list[tuple[Segments, int, int, int, int]]:
    """Runs of segments, one for each call of the kernel, with their first and last queries and keys.

    The kernel's deterministic backward splits the keys of a document into ceil(processors / (segments x heads)) sums.
    Hence a call has enough segments for one sum, empty ones included, so that the bits of a document do not depend on
    how many others there are. A long document is alone in its call: it is split in any case, and uses the whole device.
    """
    lengths = [k_count for _, _, _, k_count in segments.each()]
    borders = {0, len(lengths)}
    for index, length in enumerate(lengths):
        if length >= LONG_DOCUMENT:
            borders |= {index, index + 1}
    if len(borders) == 2:
        return [(segments, 0, segments.queries[-1], 0, segments.keys[-1])]
    ordered = sorted(borders)
    calls = []
    for first, last in itertools.pairwise(ordered):
        queries, keys = segments.queries[first : last + 1], segments.keys[first : last + 1]
        part = Segments(tuple(at - queries[0] for at in queries), tuple(at - keys[0] for at in keys))
        calls.append((part, queries[0], queries[-1], keys[0], keys[-1]))
    return calls


def _slots(q: Tensor) -> int:
    """The fewest segments of a call with which the deterministic backward makes one sum (see `_backward_calls`)."""
    return -(-_processors(q.device) // q.shape[1])


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _takes_num_splits() -> bool:
    arguments = aten._flash_attention_forward.default._schema.arguments
    return any(argument.name == "num_splits" for argument in arguments)


def _longest(segments: Segments, window: int | None) -> tuple[int, int]:
    """The longest queries and keys that a call is sized for. Never so short that the kernel drops the window or the
    causal mask: a document's bits would then depend on the longest one."""
    lengths = [(q_count, k_count) for _, q_count, _, k_count in segments.each()]
    q, k = (max(128, *pair) if len(pair) > 1 else max(128, pair[0]) for pair in zip(*lengths, strict=True))
    return -(-q // 128) * 128, -(-max(k, window or 0) // 128) * 128


def _window(window: int | None) -> dict[str, int | None]:
    """The kernel's window does not count the query itself."""
    if window is None:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _flat(x_BHTK: Tensor) -> Tensor:
    """[B, H, T, K] to [B x T, H, K]."""
    return x_BHTK.transpose(1, 2).flatten(0, 1)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels of CUDA have a deterministic backward, and choose it by this global switch of torch alone."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled and not warns:
        yield
        return
    previous = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = previous  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


def _refuse_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    window: int | None,
    sinks: Tensor | None,
    unsupported: dict[str, float | None],
) -> None:
    """Raise SpecError for what no kernel computes, and ValueError for tensors that do not fit together."""
    if unknown := unsupported.keys() - {"dropout", "softcap"}:
        raise TypeError(f"packed_attention has no parameter {min(unknown)}")
    dropout, softcap = unsupported.get("dropout"), unsupported.get("softcap")
    problems = []
    if dropout:
        problems.append(Problem("attention.dropout", dropout, "is not computed by packed attention", "set it to 0"))
    if softcap is not None:
        problem, remedy = "is not computed by packed attention", "use a model whose attention has no softcap"
        problems.append(Problem("attention.softcap", softcap, problem, remedy))
    if window is not None and window < 1:
        problems.append(Problem("attention.window", window, "hides every position", "give at least 1, or none"))
    width = max(q.shape[-1], v.shape[-1])
    if uses_flash(q) and width > FLASH_WIDTH:
        problem = f"is wider than the flash kernel's largest head ({FLASH_WIDTH}) in {q.dtype}"
        problems.append(Problem("attention.head_width", width, problem, "train this model in fp32"))
    if q.is_cuda and q.dtype == torch.float64:
        remedy = "use fp32, bf16 or fp16, or the CPU"
        problems.append(Problem("attention.dtype", str(q.dtype), "has no attention kernel on CUDA", remedy))
    if q.device.type not in ("cpu", "cuda", "meta"):
        problem, remedy = "has no kernel for packed attention", "use CPU or CUDA"
        problems.append(Problem("attention.device", q.device.type, problem, remedy))
    if problems:
        raise SpecError(problems, "attention")
    (batch, heads, length, k_width), (_, groups, keys, _) = q.shape, k.shape
    agree = heads % groups == 0 and k.shape == (batch, groups, keys, k_width) and v.shape[:3] == k.shape[:3]
    if not agree or q.dtype != k.dtype or q.dtype != v.dtype or (sinks is not None and sinks.shape != (heads,)):
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (q, k, v))
        raise ValueError(f"q, k and v do not fit together: {shapes}; give one dtype, and whole groups of heads")
    if segments.queries[-1] != batch * length or segments.keys[-1] != batch * keys:
        bounds = segments.queries[-1], segments.keys[-1]
        raise ValueError(
            f"the segments end at {bounds} and the batch at {(batch * length, batch * keys)}; give those of the batch"
        )
    for q_start, q_count, k_start, k_count in segments.each():
        if q_start % length + q_count > length or k_start % keys + k_count > keys:
            raise ValueError(
                f"the segment of {q_count} queries at {q_start} and {k_count} keys at {k_start} crosses rows of "
                f"{length} and {keys}; end a segment where its row ends"
            )
