"""Decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and a tied or untied head.

The switches of a family (`spec.model.Preset`) and of each layer (`LayerShape`) select windows, biases, norms, rotation,
the activation, sinks and mixtures of experts (`experts`). `state_dict()` has the names of Llama in Hugging Face's
layout, which the families share. The arithmetic is deterministic if torch is configured so. `initialise` makes the
first weights. Engines handle precision and sharding, and parameters are fp32 here.

Shape suffixes: B batch, T tokens, S positions of keys (T plus cached ones), D hidden, F feed-forward width, V
vocabulary, N tokens of all sequences, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.model.attention.packed import packed_attention
from holdfast.model.attention.segments import Segments
from holdfast.model.experts import Experts, Load, Router
from holdfast.model.token_logprobs import CHUNK, IGNORED, Likeliest, likeliest_tokens, token_logprobs
from holdfast.spec.model import LayerShape, Model, RopeScaling

# Rotary positions: the rotation angles of queries and keys, for the contexts that a model's scaling allows.
#
# The bits are the same on every device. Shape suffixes are those of `decoder`, except that K is half a head's width for
# frequencies.

# ruff: noqa: N803, N806 - shape suffixes are upper case


def rotary_tables(positions: int, width: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [positions, width] each, fp32.

    They are computed on the CPU for every device, so that all devices rotate by the same bits. Formula: RoFormer,
    equation 34, with the halves in the layout of Llama's published weights.
    """
    with torch.device("cpu"):
        frequency_K = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        if scaling.kind == "linear":
            frequency_K = frequency_K / scaling.factor
        elif scaling.kind == "llama3":
            frequency_K = _as_llama3(frequency_K, scaling)
        elif scaling.kind == "yarn":
            frequency_K = _as_yarn(width, theta, scaling)
        elif scaling.kind == "longrope":
            factors = scaling.long_factors if positions > scaling.original_context else scaling.short_factors
            power_K = torch.arange(0, width, 2, dtype=torch.int64).float() / width
            frequency_K = 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**power_K)
        angle_TK = torch.outer(torch.arange(positions, dtype=torch.float32), frequency_K).repeat(1, 2)
        cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
        if scaling.kind in ("yarn", "longrope"):
            factor = attention_factor(scaling)
            cos_TK, sin_TK = cos_TK * factor, sin_TK * factor
        return cos_TK, sin_TK


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines: YaRN (Peng et al. 2023, equation 22) and LongRoPE (Ding et al. 2024)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))


def _as_yarn(width: int, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN: frequencies with few rotations in the original context are divided by the factor, those with many are
    unchanged, and the share grows linearly between. The order of operations is that of `transformers`."""

    def place(rotations: float) -> float:
        return width * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    wave_K = theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    ramp_K = (torch.arange(width // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept_K = 1 - ramp_K.clamp(0, 1)
    return 1.0 / (scaling.factor * wave_K) * (1 - kept_K) + 1.0 / wave_K * kept_K


def _as_llama3(frequency_K: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1 scaling: long waves are slowed down by the factor, and short ones are unchanged. Between the two
    bounds the share of slowdown is linear in the frequency. The order of operations is that of `transformers`, for
    the same bits."""
    low, high, context = scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_context
    wave_K = 2 * math.pi / frequency_K
    share_K = (context / wave_K - low) / (high - low)
    between_K = (1 - share_K) * frequency_K / scaling.factor + share_K * frequency_K
    scaled_K = torch.where(wave_K > context / low, frequency_K / scaling.factor, frequency_K)
    return torch.where((wave_K >= context / high) & (wave_K <= context / low), between_K, scaled_K)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate every pair (k, k + K/2) of a head by the angle of its position. Tables of a smaller width rotate only the
    first part of a head."""
    if cos_TK.shape[-1] < x_BHTK.shape[-1]:
        rotated, rest = x_BHTK.split((cos_TK.shape[-1], x_BHTK.shape[-1] - cos_TK.shape[-1]), dim=-1)
        return torch.cat((rotate(rotated, cos_TK, sin_TK), rest), dim=-1)
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


# ruff: noqa: N803, N806, N815 - shape suffixes are upper case


SCORE = "score.weight"  # name of a scalar head


def document_ids(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """Number the documents packed into each sequence: [B, T], from 0. An end-of-text token belongs to the document
    that it ends."""
    return numbered(tokens_BT == end_of_text)


def numbered(ends_BT: Tensor) -> Tensor:
    """Number the documents by their end marks: [B, T], from 0."""
    return ends_BT.cumsum(dim=1) - ends_BT.long()


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

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions. Returns all positions."""
        self.k_BGSK = k_BGTK if self.k_BGSK is None else torch.cat((self.k_BGSK, k_BGTK), dim=2)
        self.v_BGSK = v_BGTK if self.v_BGSK is None else torch.cat((self.v_BGSK, v_BGTK), dim=2)
        return self.k_BGSK, self.v_BGSK


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
        attend: Callable[..., Tensor] = self.attend
        if cache is not None:
            attend = self._attend_one if cache.positions else self.attend
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
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

    def _attend_one(self, q_BH1K: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, _: Segments) -> Tensor:
        """The same for one token after cached ones, which sees all of them in its window."""
        if self.window is not None:
            k_BGSK, v_BGSK = k_BGSK[:, :, -self.window :], v_BGSK[:, :, -self.window :]
        rows, keys = len(k_BGSK), k_BGSK.shape[2]
        if self.sinks is None:
            return F.scaled_dot_product_attention(q_BH1K, k_BGSK, v_BGSK, scale=self.scale, enable_gqa=True)
        segments = Segments(tuple(range(rows + 1)), tuple(range(0, rows * keys + 1, keys)))
        return packed_attention(q_BH1K, k_BGSK, v_BGSK, segments, None, self.local_sinks, self.scale)

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


class Trunk(nn.Module):
    """Embedding, layers and the last norm, which Hugging Face calls `model`. `Decoder` runs it."""

    def __init__(self, shape: Model, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in shape.layer_shapes())
        self.norm = norm_of(shape, shape.hidden)


class Decoder(nn.Module):
    """A language model over `vocabulary` tokens. `end_of_text` is for `generate`. The arithmetic does not need it."""

    cos_TK: Tensor
    sin_TK: Tensor
    local_cos_TK: Tensor
    local_sin_TK: Tensor

    def __init__(self, shape: Model, vocabulary: int, end_of_text: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        self.end_of_text = end_of_text
        self.stops: tuple[int, ...] = ()  # tokens that end generation, in addition to `end_of_text`
        self.positions_T: Tensor | None = None  # the positions of each sequence on this rank; None: all
        self.loss_chunk = CHUNK  # tokens whose logits exist at a time in the loss
        self.local_segments: Callable[[Segments], Any] = lambda segments: segments  # what attention on this rank takes
        self.add_up: Callable[[Tensor], Tensor] | None = None  # sums counts over the ranks with the other positions
        self.layer_shapes = shape.layer_shapes()
        self.model = Trunk(shape, vocabulary)
        scalar = shape.head == "scalar"
        self.lm_head = None if shape.tie_embeddings or scalar else Linear(shape.hidden, vocabulary, bias=False)
        self.score = Linear(shape.hidden, 1, bias=False) if scalar else None
        for name in ("cos_TK", "sin_TK", *(("local_cos_TK", "local_sin_TK") if shape.preset.local_rope else ())):
            self.register_buffer(name, torch.empty(shape.context, shape.rotary_width), persistent=False)
        self.reset_buffers()

    @classmethod
    def empty(
        cls, shape: Model, vocabulary: int, device: torch.device | str = "cpu", end_of_text: int | None = None
    ) -> Decoder:
        """A decoder on `device` with unfilled weights. It is cheap, and draws no random numbers."""
        with torch.device(device):
            return cls(shape, vocabulary, end_of_text)

    def reset_buffers(self) -> None:
        """Fill the rotary tables. Call it after `to_empty()`, which leaves them undefined. Does nothing on meta."""
        if not self.cos_TK.is_meta:
            shape, width = self.shape, self.shape.rotary_width
            cos_TK, sin_TK = rotary_tables(shape.context, width, shape.rope_theta, shape.rope_scaling)
            self.cos_TK.copy_(cos_TK)
            self.sin_TK.copy_(sin_TK)
            if shape.preset.local_rope:
                theta = shape.rope_local_theta or shape.rope_theta
                cos_TK, sin_TK = rotary_tables(shape.context, width, theta, RopeScaling())
                self.local_cos_TK.copy_(cos_TK)
                self.local_sin_TK.copy_(sin_TK)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream before the first layer."""
        x_BTD = self.model.embed_tokens(tokens_BT)
        return x_BTD * self.shape.hidden**0.5 if self.shape.preset.scaled_embedding else x_BTD

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        segments: Segments | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        cache: list[LayerCache] | None = None,
        likeliest: int | None = None,
    ) -> Tensor | Likeliest:
        """Logits [B, T, V]. With targets, their cross-entropy in nats, fp32, over the targets that are not IGNORED:
        the mean, the sum, or each (`reduction`), without the logits of all tokens. Targets are [B, T], or several of a
        position. With `likeliest`, that number of the likeliest tokens after each position. A scalar head gives one
        number for each token instead: fp32 [B, T]. See `hidden` for the remaining parameters."""
        x_BTD, unevenness_B = self._hidden(tokens_BT, segments, cache)
        if self.score is not None:
            return self.score(x_BTD)[..., 0].float()
        if likeliest is not None:
            return likeliest_tokens(*self._head_inputs(x_BTD), likeliest, self.loss_chunk)
        return self.head(x_BTD) if targets_BT is None else self.loss(x_BTD, targets_BT, reduction, unevenness_B)

    def loss(
        self,
        x_BTD: Tensor,
        targets_BT: Tensor,
        reduction: Literal["mean", "sum", "none"] = "mean",
        unevenness_B: Tensor | None = None,
    ) -> Tensor:
        """The cross-entropy from the output of `hidden`, as in `forward`. If a loss balances experts, the gradient also
        includes that of their unevenness, charged for each counted token of a sequence. The value does not include
        it."""
        losses_BT = -self.logprobs(x_BTD, targets_BT)
        charge_B = self.charge(unevenness_B, targets_BT)
        if charge_B is not None:  # its gradient comes with the first loss of each sequence
            losses_BT = torch.cat((losses_BT[:, :1] + (charge_B - charge_B.detach())[:, None], losses_BT[:, 1:]), 1)
        if reduction == "none":
            return losses_BT
        loss = losses_BT.sum()
        return loss / (targets_BT != IGNORED).sum() if reduction == "mean" else loss

    def logprobs(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """The log-probabilities of targets from the output of `hidden`: fp32 [B, T], 0 where IGNORED. Tensor
        parallelism, which has only a part of the vocabulary, replaces this function."""
        return token_logprobs(*self._head_inputs(x_BTD), targets_BT, chunk=self.loss_chunk)

    def _head_inputs(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of the logits, in the type of their product."""
        head_VD = self.head_weight
        if torch.is_autocast_enabled(x_BTD.device.type):  # the backward pass multiplies outside of autocast
            narrow = torch.get_autocast_dtype(x_BTD.device.type)
            x_BTD, head_VD = x_BTD.to(narrow), head_VD.to(narrow)
        return x_BTD, head_VD

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the head [V, D]: the embedding's if they are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def charge(self, unevenness_B: Tensor | None, targets_BT: Tensor) -> Tensor | None:
        """The charge of each sequence if a loss balances experts: their unevenness, times the counted tokens. None
        otherwise, and outside training."""
        if unevenness_B is None or not self.training or self.shape.routing.balance != "auxiliary":
            return None
        counted_B = (targets_BT != IGNORED).sum(1)
        if self.add_up is not None:
            counted_B = self.add_up(counted_B)
        return self.shape.routing.coefficient * (unevenness_B * counted_B)

    def hidden(
        self, tokens_BT: Tensor, segments: Segments | None = None, cache: list[LayerCache] | None = None
    ) -> Tensor:
        """The input of the head: [B, T, D].

        `segments` keep attention inside a document. By default a sequence is one document. Positions remain those of
        the sequence, because rotary attention depends only on their differences. `segments` cover whole sequences, even
        if this rank has only their positions `positions_T`. `attend` then gathers keys and values. `cache` (one per
        layer, see `generate`) holds the positions before `tokens_BT`. If it is not empty, T is 1. Raises ValueError if
        all positions do not fit into `shape.context`.
        """
        return self._hidden(tokens_BT, segments, cache)[0]

    def _hidden(
        self, tokens_BT: Tensor, segments: Segments | None, cache: list[LayerCache] | None
    ) -> tuple[Tensor, Tensor | None]:
        start = cache[0].positions if cache else 0
        end = start + tokens_BT.shape[1]
        if end > self.shape.context or (start and end != start + 1):
            raise ValueError(
                f"{end - start} tokens after {start} cached positions in a context of {self.shape.context}; "
                "cut the sequence, and after a cache give one token at a time"
            )
        x_BTD, unevenness_B = self.through(self.embed(tokens_BT), start, end, segments, cache)
        return self.model.norm(x_BTD), unevenness_B

    def through(
        self,
        x_BTD: Tensor,
        start: int,
        end: int,
        segments: Segments | None = None,
        cache: list[LayerCache] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream of the positions [start, end) after the local layers, and the unevenness of their
        experts in each sequence [B]. A pipeline stage has only some layers."""
        positions: slice | Tensor = slice(start, end)
        if self.positions_T is not None:
            positions, end = self.positions_T, self.shape.context
        main = self.cos_TK[positions], self.sin_TK[positions]
        local = (self.local_cos_TK[positions], self.local_sin_TK[positions]) if self.shape.preset.local_rope else main
        if segments is None:
            segments = Segments.of_rows(len(x_BTD), end - start)
        segments = self.local_segments(segments)
        unevenness_B = None
        for index, layer in enumerate(self.model.layers):
            if layer is not None:
                cos_TK, sin_TK = local if self.layer_shapes[index].rope == "local" else main
                x_BTD, load = layer(x_BTD, cos_TK, sin_TK, segments, cache[index] if cache else None)
                if self.training and isinstance(layer.mlp, Mixture):
                    layer.mlp.gate.count(load)  # not within the layer, which may be computed twice
                    unevenness_B = load.unevenness_B if unevenness_B is None else unevenness_B + load.unevenness_B
        return x_BTD, unevenness_B

    def head(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V] from the output of `hidden`. Positions are independent, so they may come in parts."""
        return F.linear(x_BTD, self.head_weight) if self.lm_head is None else self.lm_head(x_BTD)
