"""The layers of a decoder: norms, attention, feed-forward and mixtures. Shape suffixes are those of `decoder`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.model.attention.packed import packed_attention
from holdfast.model.attention.segments import Segments
from holdfast.model.experts import Experts, Load, Router
from holdfast.model.rotary import rotate
from holdfast.spec.model import LayerShape, Model

# ruff: noqa: N803, N806 - shape suffixes are upper case


class Linear(nn.Linear):
    """A linear layer without initialization. `initialise` or a checkpoint fills it."""

    def reset_parameters(self) -> None:
        """Does nothing. On the meta device torch would import its compiler for this, which takes seconds."""


class Embedding(nn.Embedding):
    """An embedding without initialization. `initialise` or a checkpoint fills it."""

    def reset_parameters(self) -> None:
        """Does nothing, as in `Linear`."""


class Norm(nn.RMSNorm):
    """RMSNorm that multiplies by its weights, plus `offset`, in fp32, and rounds once. `nn.RMSNorm` does both in the
    precision of its input."""

    def __init__(self, width: int, eps: float, offset: float) -> None:
        super().__init__(width, eps=eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and data type."""
        weight = self.weight.float()
        return F.rms_norm(
            x.float(), self.normalized_shape, weight + self.offset if self.offset else weight, self.eps
        ).type_as(x)


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    to_local: Callable[[], Tensor] | None = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()


class WholeNorm(Norm):
    """A norm over the width of all heads (OLMo 2). Tensor parallelism, which splits the width, replaces `add_up`."""

    add_up: Callable[[Tensor], Tensor] | None = None  # sums over all parts of the width; None: the width is here

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and data type."""
        if self.add_up is None:
            return super().forward(x)
        assert self.eps is not None
        x_fp32 = x.float()
        mean = self.add_up(x_fp32.square().sum(-1, keepdim=True)) / self.normalized_shape[0]
        return (x_fp32 * torch.rsqrt(mean + self.eps) * _local(self.weight).float()).type_as(x)


def norm_of(shape: Model, width: int) -> nn.RMSNorm:
    """The norm of a family."""
    preset = shape.preset
    if preset.norm_in_fp32:
        return Norm(width, shape.norm_epsilon, preset.norm_offset)
    return nn.RMSNorm(width, eps=shape.norm_epsilon)


class LayerCache:
    """Cached keys and values of one layer, for generation."""

    def __init__(self) -> None:
        self.k_BGSK: Tensor | None = None
        self.v_BGSK: Tensor | None = None

    @property
    def positions(self) -> int:
        """The number of cached positions."""
        return 0 if self.k_BGSK is None else self.k_BGSK.shape[2]

    def attend(
        self, attention: Attention, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, segments: Segments
    ) -> Tensor:
        """Append the new positions. Returns the attention output of the queries to all cached ones: [B, H, T, K]."""
        if self.k_BGSK is None or self.v_BGSK is None:
            self.k_BGSK, self.v_BGSK = k_BGTK, v_BGTK
            return attention.attend(q_BHTK, k_BGTK, v_BGTK, segments)
        self.k_BGSK, self.v_BGSK = torch.cat((self.k_BGSK, k_BGTK), dim=2), torch.cat((self.v_BGSK, v_BGTK), dim=2)
        return attention.attend_one(q_BHTK, self.k_BGSK, self.v_BGSK)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head.

    `window` is the number of positions that a query sees, itself included. `sinks` are one logit for each head, and
    `scale` is the factor of the scores (see `packed_attention`).
    """

    sinks: nn.Parameter | None

    def __init__(self, shape: Model, layer: LayerShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        window = layer.window
        self.window = window if window is not None and window < shape.context else None
        self.rotates = layer.rope != "none"
        self.scale = shape.attention_scale
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if shape.preset.sinks else None
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        self.o_proj: Linear
        self._add_projections(shape)

    def _add_projections(self, shape: Model) -> None:
        width, bias = shape.head_width, shape.biases != "none"
        self.q_proj = Linear(shape.hidden, shape.heads * width, bias=bias)
        self.k_proj = Linear(shape.hidden, shape.key_value_heads * width, bias=bias)
        self.v_proj = Linear(shape.hidden, shape.key_value_heads * width, bias=bias)
        self.o_proj = Linear(shape.heads * width, shape.hidden, bias=shape.biases == "qkvo")
        if shape.query_key_norms == "head":
            self.q_norm, self.k_norm = norm_of(shape, width), norm_of(shape, width)
        elif shape.query_key_norms == "whole":
            self.q_norm, self.k_norm = (
                WholeNorm(heads * width, shape.norm_epsilon, shape.preset.norm_offset)
                for heads in (shape.heads, shape.key_value_heads)
            )

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, segments: Segments, cache: LayerCache | None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]. `cache` has the positions before these. If there are any, T is 1."""
        q_BHTK, k_BGSK, v_BGSK = self.project(x_BTD, cos_TK.to(x_BTD.dtype), sin_TK.to(x_BTD.dtype))
        attend = self.attend if cache is None else partial(cache.attend, self)
        return self.o_proj(attend(q_BHTK, k_BGSK, v_BGSK, segments).transpose(1, 2).flatten(2))

    def project(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, K], keys and values [B, G, T, K] of these positions."""
        q_BHTK = self._heads(self.q_proj(x_BTD), self.q_norm)
        k_BGTK = self._heads(self.k_proj(x_BTD), self.k_norm)
        if self.rotates:
            q_BHTK, k_BGTK = rotate(q_BHTK, cos_TK, sin_TK), rotate(k_BGTK, cos_TK, sin_TK)
        return q_BHTK, k_BGTK, self._heads(self.v_proj(x_BTD))

    def attend(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, segments: Segments) -> Tensor:
        """The attention output of the queries: [B, H, T, K]. Context parallelism replaces this function."""
        return packed_attention(q_BHTK, k_BGSK, v_BGSK, segments, self.window, self.local_sinks, self.scale)

    @property
    def local_sinks(self) -> Tensor | None:
        """The sinks of this rank's heads."""
        return None if self.sinks is None else _local(self.sinks)

    def attend_one(self, q_BH1K: Tensor, k_BGSK: Tensor, v_BGSK: Tensor) -> Tensor:
        """The same for one token after cached ones, which sees all of them in its window."""
        if self.window is not None:
            k_BGSK, v_BGSK = k_BGSK[:, :, -self.window :], v_BGSK[:, :, -self.window :]
        rows, keys = len(k_BGSK), k_BGSK.shape[2]
        if self.sinks is None:
            return F.scaled_dot_product_attention(q_BH1K, k_BGSK, v_BGSK, scale=self.scale, enable_gqa=True)
        segments = Segments(tuple(range(rows + 1)), tuple(range(0, rows * keys + 1, keys)))
        return packed_attention(q_BH1K, k_BGSK, v_BGSK, segments, None, self.local_sinks, self.scale)

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return self.head_width**-0.5 if self.scale is None else self.scale

    def shares(self, scores: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """The shares of positions, the last dimension of the scores. `shape` has the dimensions before the heads of a
        group; its second one are the groups. Sinks are positions without a value."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(1, shape[1], 1, -1).expand(*shape, -1).reshape(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def _heads(self, x_BTD: Tensor, norm: nn.RMSNorm | None = None) -> Tensor:
        if isinstance(norm, WholeNorm):
            x_BTD, norm = norm(x_BTD), None
        x_BTHK = x_BTD.unflatten(2, (-1, self.head_width))
        return (x_BTHK if norm is None else norm(x_BTHK)).transpose(1, 2)


LATENT_EPSILON = 1e-6  # of the norms of latents; `norm_epsilon` is not used for them


class LatentAttention(Attention):
    """Attention whose queries, keys and values come from narrow latents (DeepSeek-V2, Liu et al. 2024). A part of each
    query and key is rotated, and that part of the keys is the same for all heads."""

    def _add_projections(self, shape: Model) -> None:
        latent, heads = shape.latent, shape.heads
        self.widths = (shape.head_width - latent.rope, latent.rope, latent.value)
        self.key_value_width = latent.key_value
        self.share: Callable[[Tensor], Tensor] = _same  # keys of all heads, where ranks have different heads
        if latent.query:
            self.q_a_proj = Linear(shape.hidden, latent.query, bias=False)
            self.q_a_layernorm = nn.RMSNorm(latent.query, eps=LATENT_EPSILON)
            self.q_b_proj = Linear(latent.query, heads * shape.head_width, bias=False)
        else:
            self.q_proj = Linear(shape.hidden, heads * shape.head_width, bias=False)
        self.kv_a_proj_with_mqa = Linear(shape.hidden, latent.key_value + latent.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(latent.key_value, eps=LATENT_EPSILON)
        self.kv_b_proj = Linear(latent.key_value, heads * (self.widths[0] + latent.value), bias=False)
        self.o_proj = Linear(heads * latent.value, shape.hidden, bias=False)
        self.has_query_latent = latent.query > 0

    def project(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`. Values are narrower."""
        plain, rotated, value = self.widths
        q_BTF = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))) if self.has_query_latent else self.q_proj(x_BTD)
        q_plain, q_rotated = self._heads(q_BTF).split((plain, rotated), dim=-1)
        latent_BTL, k_rotated = self.kv_a_proj_with_mqa(x_BTD).split((self.key_value_width, rotated), dim=-1)
        kv_BHTK = self.kv_b_proj(self.kv_a_layernorm(latent_BTL)).unflatten(2, (-1, plain + value)).transpose(1, 2)
        k_plain, v_BHTV = kv_BHTK.split((plain, value), dim=-1)
        q_rotated = rotate(_pairs_apart(q_rotated), cos_TK, sin_TK)
        k_rotated = rotate(_pairs_apart(self.share(k_rotated))[:, None], cos_TK, sin_TK)
        k_BHTK = torch.cat((k_plain, k_rotated.expand(-1, k_plain.shape[1], -1, -1)), dim=-1)
        return torch.cat((q_plain, q_rotated), dim=-1), k_BHTK, v_BHTV


def _same(x: Tensor) -> Tensor:
    return x


def _pairs_apart(x: Tensor) -> Tensor:
    """Alternating pairs (2k, 2k + 1) in the places (k, k + K/2) that `rotate` reads."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Gemma has GELU in place of SiLU."""

    def __init__(self, hidden: int, width: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.activate = partial(F.gelu, approximate="tanh") if gelu else F.silu
        self.gate_proj = Linear(hidden, width, bias=False)
        self.up_proj = Linear(hidden, width, bias=False)
        self.down_proj = Linear(width, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.down_proj(self.activate(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Mixture(nn.Module):
    """A mixture of experts in place of a feed-forward layer, with the shared experts as one."""

    shared_experts: FeedForward | None
    shared_expert: FeedForward | None
    shared_expert_gate: Linear | None

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape)
        shared_experts = (
            FeedForward(shape.hidden, shape.routing.shared * shape.ffn_width) if shape.routing.shared else None
        )
        self.shared_experts = shared_experts if shape.preset.shared == "plain" else None
        self.shared_expert = shared_experts if shape.preset.shared == "weighted" else None
        self.shared_expert_gate = Linear(shape.hidden, 1, bias=False) if self.shared_expert is not None else None

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Load]:
        """[B, T, D] to [B, T, D], and the load of the experts."""
        shared_BTD = None
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            made_BTD = self.shared_expert(x_BTD)
            shared_BTD = F.sigmoid(self.shared_expert_gate(x_BTD)) * made_BTD
        elif self.shared_experts is not None:
            shared_BTD = self.shared_experts(x_BTD)
        chosen_NC, weight_NC, load = self.gate(x_BTD)
        y_BTD = self.experts(x_BTD.flatten(0, 1), chosen_NC, weight_NC).view_as(x_BTD)
        return (y_BTD if shared_BTD is None else y_BTD + shared_BTD), load


class Layer(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream. OLMo normalizes their results in
    place of the copies, and Gemma does both."""

    def __init__(self, shape: Model, layer: LayerShape) -> None:
        super().__init__()
        before, after = shape.preset.norms != "post", shape.preset.norms != "pre"
        self.input_layernorm = norm_of(shape, shape.hidden) if before else None
        self.self_attn = LatentAttention(shape, layer) if shape.preset.latent else Attention(shape, layer)
        self.post_attention_layernorm = norm_of(shape, shape.hidden)  # the name is that of two different places
        self.pre_feedforward_layernorm = norm_of(shape, shape.hidden) if before and after else None
        self.mlp: Mixture | FeedForward
        if layer.mixture:
            self.mlp = Mixture(shape)
        else:
            gelu = shape.preset.activation == "gelu_tanh"
            self.mlp = FeedForward(shape.hidden, shape.dense_width, gelu=gelu)
        self.post_feedforward_layernorm = norm_of(shape, shape.hidden) if after else None

    def forward(
        self,
        x_BTD: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        segments: Segments,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, Load | None]:
        """The residual stream [B, T, D] after this layer, and the load of its experts, or None."""
        first_BTD = x_BTD if self.input_layernorm is None else self.input_layernorm(x_BTD)
        output = self.self_attn(first_BTD, cos_TK, sin_TK, segments, cache)
        after = self.post_feedforward_layernorm
        x_BTD = x_BTD + (output if after is None else self.post_attention_layernorm(output))
        before = self.post_attention_layernorm if after is None else self.pre_feedforward_layernorm
        output, load = self.mlp(x_BTD if before is None else before(x_BTD)), None
        if isinstance(self.mlp, Mixture):
            output, load = output
        return x_BTD + (output if after is None else after(output)), load
