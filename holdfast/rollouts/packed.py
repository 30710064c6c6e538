"""A decoder for the tokens of a lot on the CPU: the same function of the weights, with half as many operations.

A token of each row is little work, so the overhead of operations and the layout of matrices decide the speed. Matrices
that have the same input are one. Each is stored as its product reads it, multiplied by the weights of the norm before
it. The last bits differ from those of `Decoder`.

Shape suffixes: as in `decoder`; B rows, H + G heads of queries and keys.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.model.decoder import Decoder
from holdfast.model.layers import Attention, FeedForward, Layer, Linear, Norm
from holdfast.rollouts.caches import LotCache


def is_packable(decoder: Decoder) -> bool:
    """Whether a decoder has the layers and the precision of a `PackedDecoder`. Adapters are other layers."""
    weight = decoder.model.embed_tokens.weight
    linear = [module for module in decoder.model.modules() if isinstance(module, nn.Linear)]
    return (
        decoder.shape.packable
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and all(type(module) is Linear for module in linear)
    )


class PackedDecoder:
    """Reads tokens, after the prompts, which the decoder reads. It has a copy of the decoder's matrices."""

    def __init__(self, decoder: Decoder) -> None:
        """The copy is of the present weights."""
        self._decoder = decoder
        self._eps = torch.tensor(decoder.shape.norm_epsilon, dtype=decoder.cos_TK.dtype)
        signed_TK = decoder.sin_TK.clone()
        signed_TK[:, : signed_TK.shape[1] // 2].neg_()  # of the second halves of heads, which come first
        self._rotary_TCK = torch.stack((decoder.cos_TK, signed_TK), 1)
        self._layers = [_PackedLayer(cast(Layer, layer), decoder, self._eps) for layer in decoder.model.layers]
        self._head_DV = _packed([decoder.head_weight], decoder.model.norm)
        self._logits_BV = self._head_DV.new_empty(0)  # all calls use it, because large tensors take long to allocate

    def read_tokens(self, caches: Sequence[LotCache], token_B: Tensor, at_B: Tensor) -> Tensor:
        """Read a token of each row at its position `at_B`. Returns the logits [B, V] of the next token, until the next
        call."""
        if len(token_B) != len(self._logits_BV):
            self._logits_BV = self._head_DV.new_empty(len(token_B), self._head_DV.shape[1])
        x_BD = self._decoder.embed(token_B)
        cos_B1K, sin_B1K = self._rotary_TCK[at_B].chunk(2, 1)
        for layer, cache in zip(self._layers, caches, strict=True):
            x_BD = layer.read(x_BD, cos_B1K, sin_B1K, cache)
        return torch.mm(_normalized(x_BD, self._eps), self._head_DV, out=self._logits_BV)


class _PackedLayer:
    """The matrices of a layer."""

    def __init__(self, layer: Layer, decoder: Decoder, eps: Tensor) -> None:
        attention, feed_forward, shape = layer.self_attn, layer.mlp, decoder.shape
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, FeedForward)
        assert layer.input_layernorm is not None
        self._attention, self._eps = attention, eps
        self._heads, self._groups, self._width = shape.heads, shape.key_value_heads, shape.head_width
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv_DF = _packed([each.weight for each in projections], layer.input_layernorm)
        biases: list[Tensor] = [each.bias for each in projections if each.bias is not None]
        self._bias_F = torch.cat(biases) if biases else None
        self._norms_HK: Tensor | None = None  # of the heads of queries and keys
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = ((attention.q_norm, self._heads), (attention.k_norm, self._groups))
            self._norms_HK = torch.cat([_weight_of(norm).expand(heads, -1) for norm, heads in norms])
        self._o_FD = _packed([attention.o_proj.weight])
        both = [feed_forward.gate_proj.weight, feed_forward.up_proj.weight]
        self._gate_up_DF = _packed(both, layer.post_attention_layernorm)
        self._down_FD = _packed([feed_forward.down_proj.weight])

    def read(self, x_BD: Tensor, cos_B1K: Tensor, sin_B1K: Tensor, cache: LotCache) -> Tensor:
        """The residual stream after this layer."""
        qkv_BF = torch.mm(_normalized(x_BD, self._eps), self._qkv_DF)
        if self._bias_F is not None:
            qkv_BF += self._bias_F
        heads, groups = self._heads, self._groups
        qkv_BHK = qkv_BF.view(len(x_BD), -1, self._width)
        qk_BHK, v_BGK = qkv_BHK[:, : heads + groups], qkv_BHK[:, heads + groups :]
        if self._norms_HK is not None:
            qk_BHK = _normalized(qk_BHK, self._eps).mul_(self._norms_HK)
        first, second = qk_BHK.chunk(2, -1)
        qk_BHK = torch.addcmul(qk_BHK * cos_B1K, torch.cat((second, first), -1), sin_B1K)
        o_BF = cache.attend_tokens(self._attention, qk_BHK[:, :heads], qk_BHK[:, heads:], v_BGK)
        x_BD = torch.addmm(x_BD, o_BF, self._o_FD)
        gate_BF, up_BF = torch.mm(_normalized(x_BD, self._eps), self._gate_up_DF).chunk(2, -1)
        return torch.addmm(x_BD, F.silu(gate_BF).mul_(up_BF), self._down_FD)


def _packed(weights: Sequence[Tensor], norm: nn.RMSNorm | None = None) -> Tensor:
    """Matrices [F, D] with the same input as one [D, F], which is always a copy."""
    parts = [weight_FD.T.clone(memory_format=torch.contiguous_format) for weight_FD in weights]
    packed_DF = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return packed_DF if norm is None else packed_DF.mul_(_weight_of(norm)[:, None])


def _weight_of(norm: nn.RMSNorm) -> Tensor:
    return norm.weight + norm.offset if isinstance(norm, Norm) else norm.weight


def _normalized(x: Tensor, eps: Tensor) -> Tensor:
    """RMSNorm without weights."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
