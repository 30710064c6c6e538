"""Attention inside packed documents, causal: one function for every path of training, without a T x T tensor.

It covers documents, sliding windows, chunks (further borders of segments), attention sinks, grouped heads, and values
of another width than queries. Kernels compute it without sinks: `flash` for bf16 and fp16 on CUDA, else `tiles`.

A sink is one more key without a value. With lse' = log(exp(lse) + exp(sink)), the output is out * exp(lse - lse'). The
kernel's backward, called with that output and lse', gives the exact gradients of q, k and v. torch's own backward of
the variable-length kernel drops the gradient of lse silently, so the gradient of the sink is computed here.

What no kernel computes is refused by name. The math kernel, which needs all scores, is never used.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from holdfast.model.attention import flash, tiles
from holdfast.model.attention.kernel import AttentionPattern, BackwardInputs, Kernel
from holdfast.model.attention.rows import WIDTHS, row_attention
from holdfast.model.attention.segments import Segments
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.model import LARGEST_HEAD


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
    if torch.is_autocast_enabled(q_BHTK.device.type):
        narrow = torch.get_autocast_dtype(q_BHTK.device.type)
        q_BHTK, k_BGSK, v_BGSV = q_BHTK.to(narrow), k_BGSK.to(narrow), v_BGSV.to(narrow)
    _refuse_unsupported(q_BHTK, k_BGSK, v_BGSV, window, sinks_H, unsupported)
    scale = q_BHTK.shape[-1] ** -0.5 if scale is None else scale
    width, value_width = q_BHTK.shape[-1], v_BGSV.shape[-1]
    common = max(width, value_width)
    if q_BHTK.is_cuda:
        common = -(-common // 8) * 8
    if common != width:
        q_BHTK, k_BGSK = F.pad(q_BHTK, (0, common - width)), F.pad(k_BGSK, (0, common - width))
    if common != value_width:
        v_BGSV = F.pad(v_BGSV, (0, common - value_width))
    out_BHTV: Tensor
    if torch.compiler.is_compiling():
        plain = window is None and sinks_H is None and width == value_width and width in WIDTHS
        if plain and segments.row_mask is not None and uses_flash(q_BHTK):
            return row_attention(q_BHTK, k_BGSK, v_BGSV, segments.row_mask, scale)
        out_BHTV, _ = _opaque_forward(q_BHTK, k_BGSK, v_BGSV, sinks_H, segments.bounds, window, scale)
    else:
        pattern = AttentionPattern(segments, window, scale)
        out_BHTV = _PackedAttention.apply(q_BHTK, k_BGSK, v_BGSV, sinks_H, pattern)
    return out_BHTV[..., :value_width]


class _PackedAttention(torch.autograd.Function):
    """`attention_forward` and `attention_backward`, for autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: AttentionPattern) -> Tensor:
        """See `attention_forward`."""
        out, lse = attention_forward(q, k, v, sinks, pattern)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.pattern = pattern
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """See `attention_backward`."""
        q, k, v, out, lse, sinks = ctx.saved_tensors
        inputs = BackwardInputs(gradients[0], q, k, v, out, lse, ctx.pattern)
        return (*attention_backward(inputs, sinks), None)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: AttentionPattern
) -> tuple[Tensor, Tensor]:
    """The output and lse of `Kernel.forward`, both with the sinks."""
    _require_whole_rows(q, k, pattern.segments)
    out, lse = kernel_for(q).forward(q, k, v, pattern)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = (out * (lse - with_sink).exp_()[..., None]).to(out.dtype)
        lse = with_sink
    return out, lse


def attention_backward(inputs: BackwardInputs, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the sinks, from the output and lse of `attention_forward`."""
    d_sinks = None
    if sinks is not None:
        weight = (sinks.to(inputs.lse.dtype)[:, None] - inputs.lse).exp_()
        delta = (inputs.gradient.to(inputs.lse.dtype) * inputs.out).sum(-1)
        d_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
    return (*kernel_for(inputs.q).backward(inputs), d_sinks)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor bounds, int? window, float scale"


@torch.library.custom_op(
    "holdfast::packed_attention", mutates_args=(), schema=f"({_OPERANDS}) -> (Tensor out, Tensor lse)"
)
def _opaque_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bounds: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attention_forward` as one operator, which a compiler does not look into. `bounds` are those of the segments."""
    out, lse = attention_forward(q, k, v, sinks, _pattern_of(bounds, window, scale))
    return _as_promised(out, q), lse.contiguous()


@torch.library.custom_op(
    "holdfast::packed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor out, Tensor lse, {_OPERANDS}) -> Tensor[]",
)
def _opaque_backward(gradient: Tensor, out: Tensor, lse: Tensor, *operands: Any) -> list[Tensor]:
    """`attention_backward` as one operator. The gradient of the sinks comes last, if there are any."""
    q, k, v, sinks, bounds, window, scale = operands
    inputs = BackwardInputs(gradient, q, k, v, out, lse, _pattern_of(bounds, window, scale))
    *gradients, d_sinks = attention_backward(inputs, sinks)
    of_sinks = [] if d_sinks is None else [d_sinks.contiguous()]
    return [_as_promised(tensor, q) for tensor in gradients if tensor is not None] + of_sinks


def _as_promised(x_BHTK: Tensor, q: Tensor) -> Tensor:
    """The same values in the memory layout that a compiler expects: the one that the kernel writes, without a copy."""
    return x_BHTK.transpose(1, 2).contiguous().transpose(1, 2) if uses_flash(q) else x_BHTK.contiguous()


@_opaque_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return _as_promised(q.new_empty(q.shape), q), lse


@_opaque_backward.register_fake
def _(*operands: Any) -> list[Tensor]:
    *tensors, sinks = operands[3:7]
    of_sinks = [] if sinks is None else [sinks.new_empty(sinks.shape)]
    return [_as_promised(tensor.new_empty(tensor.shape), tensor) for tensor in tensors] + of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, window, scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.options = window, scale
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    out, lse, q, k, v, sinks, bounds = ctx.saved_tensors
    d_q, d_k, d_v, *d_sinks = _opaque_backward(gradients[0], out, lse, q, k, v, sinks, bounds, *ctx.options)
    return d_q, d_k, d_v, d_sinks[0] if d_sinks else None, None, None, None


_opaque_forward.register_autograd(_gradients, setup_context=_save)


def _pattern_of(bounds: Tensor, window: int | None, scale: float) -> AttentionPattern:
    queries, keys = bounds.tolist()
    return AttentionPattern(_segments_of(tuple(queries), tuple(keys)), window, scale)


_segments_of = lru_cache(maxsize=8)(Segments)  # all layers have the same, and its copy on the device


def kernel_for(q: Tensor) -> Kernel:
    """The kernel that computes attention for these queries."""
    return flash if uses_flash(q) else tiles


def uses_flash(q: Tensor) -> bool:
    """Whether the flash kernel computes it."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _refuse_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    if uses_flash(q) and width > LARGEST_HEAD:
        problem = f"is wider than the flash kernel's largest head ({LARGEST_HEAD}) in {q.dtype}"
        problems.append(Problem("attention.head_width", width, problem, "train this model in fp32"))
    if problems:
        raise SpecError(problems, "attention")
    (batch, heads, _, k_width), (_, groups, keys, _) = q.shape, k.shape
    agree = heads % groups == 0 and k.shape == (batch, groups, keys, k_width) and v.shape[:3] == k.shape[:3]
    if not agree or q.dtype != k.dtype or q.dtype != v.dtype or (sinks is not None and sinks.shape != (heads,)):
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (q, k, v))
        raise ValueError(f"q, k and v do not fit together: {shapes}; give one dtype, and whole groups of heads")


def _require_whole_rows(q: Tensor, k: Tensor, segments: Segments) -> None:
    """Raise ValueError for segments that are not those of the batch."""
    batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
    if segments.queries[-1] != batch * length or segments.keys[-1] != batch * keys:
        bounds = segments.queries[-1], segments.keys[-1]
        raise ValueError(
            f"the segments end at {bounds} and the batch at {(batch * length, batch * keys)}; give those of the batch"
        )
    for q_start, q_count, k_start, k_count in segments.each():
        if q_count == 0:
            continue  # keys that no query sees, of any rows
        if q_start % length + q_count > length or k_start % keys + k_count > keys:
            raise ValueError(
                f"the segment of {q_count} queries at {q_start} and {k_count} keys at {k_start} crosses rows of "
                f"{length} and {keys}; end a segment where its row ends"
            )
