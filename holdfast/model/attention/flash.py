"""Attention by torch's variable-length flash kernel (bf16 and fp16 on CUDA), with its own deterministic backward.

The bits of a document do not depend on the other documents of the batch (see `_backward_calls`).
"""

# ruff: noqa: N803 - shape suffixes are upper case
from __future__ import annotations

import itertools
from functools import cache

import torch
from torch import Tensor

from holdfast.model.attention.kernel import AttentionPattern, BackwardInputs, deterministic_backward
from holdfast.model.attention.segments import Segments
from holdfast.spec.model import LONG_DOCUMENT

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
    """See `Kernel.forward`."""
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


def backward(inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernel.backward`."""
    gradient, q, k, v, out, lse, pattern = inputs
    batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
    flat = [_flat(tensor) for tensor in (gradient, q, k, v, out)]
    flat_lse = lse.transpose(0, 1).flatten(1)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
    parts: list[tuple[Tensor, ...]] = []
    for part, first_q, end_q, first_k, end_k in _backward_calls(pattern.segments):
        own, theirs = slice(first_q, end_q), slice(first_k, end_k)
        alone = len(part.queries) == 2 and part.keys[-1] >= LONG_DOCUMENT
        q_bounds, k_bounds = part.on(q.device, 1 if alone else _slots(q))
        with deterministic_backward():
            result = aten._flash_attention_backward(
                *(tensor[rows] for tensor, rows in zip(flat, (own, own, theirs, theirs, own), strict=True)),
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
