"""Attention by torch's variable-length flash kernel (bf16 and fp16 on CUDA), with its own backward.

The bits of a document do not depend on the other documents of the batch (see `_backward_calls`). Where no bits are
promised, the backward is the faster one, whose sums have no order.
"""

# ruff: noqa: N803 - shape suffixes are upper case
import itertools
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.model.attention.kernel import AttentionPattern, BackwardInputs, deterministic_backward, promises_bits
from holdfast.model.attention.segments import Segments
from holdfast.spec.model import LONG_DOCUMENT, WHOLE_ROW

aten = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
    """See `Kernel.forward`."""
    batch, _heads, length, _ = q.shape
    q_bounds, k_bounds = pattern.segments.on(q.device, -(-_processors(q.device) // q.shape[1]))
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
    for part, own, theirs, slots in _backward_calls(pattern.segments, keys, q.shape[1], _processors(q.device)):
        q_bounds, k_bounds = part.on(q.device, slots)
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


class BackwardCall(NamedTuple):
    """One call of the kernel's backward: consecutive segments, their queries and keys, and the fewest segments that it
    gets. Empty ones fill it."""

    segments: Segments
    queries: slice
    keys: slice
    slots: int


def _backward_calls(segments: Segments, row: int, heads: int, processors: int) -> list[BackwardCall]:
    """The calls for some segments of rows with `row` keys.

    The kernel's deterministic backward splits the keys of a document into ceil(processors / (segments x heads)) sums.
    The segments of a call are chosen so that this number depends on the document alone: one sum, two for a document
    that fills its row, and for a long document, alone in its call, as many as the device takes. Hence the bits of a
    document do not depend on its neighbors. Without a promise of bits there is one call.
    """
    documents = list(segments.each())
    if not promises_bits():
        return [_call(segments, 0, len(documents), 1)]

    def kind(index: int) -> tuple[int, int]:
        """The most documents of a call, and its slots."""
        keys = documents[index][3]
        if keys >= LONG_DOCUMENT:
            return 1, 1
        if keys == row >= WHOLE_ROW and heads < processors:
            return (processors - 1) // heads, -(-processors // (2 * heads))
        return len(documents), -(-processors // heads)

    calls = []
    for (most, slots), alike in itertools.groupby(range(len(documents)), kind):
        indexes = list(alike)
        for first in range(indexes[0], indexes[-1] + 1, most):
            calls.append(_call(segments, first, min(first + most, indexes[-1] + 1), slots))
    return calls


def _call(segments: Segments, first: int, end: int, slots: int) -> BackwardCall:
    queries, keys = segments.queries[first : end + 1], segments.keys[first : end + 1]
    whole = len(queries) == len(segments.queries)
    part = segments if whole else Segments(tuple(x - queries[0] for x in queries), tuple(x - keys[0] for x in keys))
    return BackwardCall(part, slice(queries[0], queries[-1]), slice(keys[0], keys[-1]), slots)


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
