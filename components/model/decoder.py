"""A Llama-family decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, a tied or an untied head.

Promises that `state_dict()` has the Hugging Face Llama names and that the arithmetic is deterministic when torch is
asked to be. Leaves the first weights to `initialise`, precision and sharding to the engines (parameters are fp32 here).

Shape suffixes: B batch, T tokens, S positions of keys (T plus what is cached), D hidden, F feed-forward width,
V vocabulary, N tokens of all sequences, H query heads, G key/value heads, K head width.
"""

# ruff: noqa: N803, N806, N815 - shape suffixes are upper case
from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.components.spec.model import Model

IGNORED = -100  # as a target: not counted in the loss


def rotary_tables(positions: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [positions, width] each, fp32.

    Computed on the CPU wherever the model runs, so that every device rotates by the same bits. Formula: RoFormer,
    equation 34, with the halves laid out as Llama's published weights expect them.
    """
    with torch.device("cpu"):
        frequency_K = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angle_TK = torch.outer(torch.arange(positions, dtype=torch.float32), frequency_K).repeat(1, 2)
        return angle_TK.cos(), angle_TK.sin()


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn every pair (k, k + K/2) of a head by the angle of its position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


def document_ids(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """Number the documents packed into each sequence: [B, T], from 0. An end-of-text token is part of what it ends."""
    ends_BT = tokens_BT == end_of_text
    return ends_BT.cumsum(dim=1) - ends_BT.long()


class Linear(nn.Linear):
    """A linear layer without first weights of its own: `initialise` or a checkpoint fills it."""

    def reset_parameters(self) -> None:
        """Does nothing. On the meta device torch would import its compiler for it, which takes seconds."""


class Embedding(nn.Embedding):
    """An embedding without first weights of its own: `initialise` or a checkpoint fills it."""

    def reset_parameters(self) -> None:
        """Does nothing, as in `Linear`."""


class LayerCache:
    """Keys and values of the positions that one layer has seen, for generation."""

    def __init__(self) -> None:
        self.k_BGSK: Tensor | None = None
        self.v_BGSK: Tensor | None = None

    @property
    def positions(self) -> int:
        """How many positions are kept."""
        return 0 if self.k_BGSK is None else self.k_BGSK.shape[2]

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the new positions; all of them come back."""
        self.k_BGSK = k_BGTK if self.k_BGSK is None else torch.cat((self.k_BGSK, k_BGTK), dim=2)
        self.v_BGSK = v_BGTK if self.v_BGSK is None else torch.cat((self.v_BGSK, v_BGTK), dim=2)
        return self.k_BGSK, self.v_BGSK


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key/value head."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.grouped = shape.key_value_heads != shape.heads
        self.q_proj = Linear(shape.hidden, shape.heads * shape.head_width, bias=False)
        self.k_proj = Linear(shape.hidden, shape.key_value_heads * shape.head_width, bias=False)
        self.v_proj = Linear(shape.hidden, shape.key_value_heads * shape.head_width, bias=False)
        self.o_proj = Linear(shape.heads * shape.head_width, shape.hidden, bias=False)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_B1TS: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; causal when there is no mask."""
        cos_TK, sin_TK = cos_TK.to(x_BTD.dtype), sin_TK.to(x_BTD.dtype)
        q_BHTK = rotate(self._heads(self.q_proj(x_BTD)), cos_TK, sin_TK)
        k_BGSK = rotate(self._heads(self.k_proj(x_BTD)), cos_TK, sin_TK)
        v_BGSK = self._heads(self.v_proj(x_BTD))
        if cache is not None:
            k_BGSK, v_BGSK = cache.append(k_BGSK, v_BGSK)
        causal = mask_B1TS is None and q_BHTK.shape[2] > 1  # one token alone sees everything before it
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, attn_mask=mask_B1TS, is_causal=causal, enable_gqa=self.grouped
        )
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.ffn_width, bias=False)
        self.up_proj = Linear(shape.hidden, shape.ffn_width, bias=False)
        self.down_proj = Linear(shape.ffn_width, shape.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        x_BTD: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        mask_B1TS: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """The residual stream [B, T, D] after this layer."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK, mask_B1TS, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Trunk(nn.Module):
    """Embedding, layers and the last norm: what Hugging Face calls `model`. `Decoder` runs it."""

    def __init__(self, shape: Model, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)


class Decoder(nn.Module):
    """A language model over `vocabulary` tokens. `end_of_text` is kept for `generate`, the arithmetic needs none."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, shape: Model, vocabulary: int, end_of_text: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.vocabulary = vocabulary
        self.end_of_text = end_of_text
        self.model = Trunk(shape, vocabulary)
        self.lm_head = None if shape.tie_embeddings else Linear(shape.hidden, vocabulary, bias=False)
        for name in ("cos_TK", "sin_TK"):
            self.register_buffer(name, torch.empty(shape.context, shape.head_width), persistent=False)
        self.reset_buffers()

    @classmethod
    def empty(
        cls, shape: Model, vocabulary: int, device: torch.device | str = "cpu", end_of_text: int | None = None
    ) -> Decoder:
        """A decoder on `device` whose weights are still to be filled. Cheap, and draws no random numbers."""
        with torch.device(device):
            return cls(shape, vocabulary, end_of_text)

    def reset_buffers(self) -> None:
        """Fill the rotary tables; call it after `to_empty()`, which leaves them undefined. Does nothing on meta."""
        if not self.cos_TK.is_meta:
            cos_TK, sin_TK = rotary_tables(self.shape.context, self.shape.head_width, self.shape.rope_theta)
            self.cos_TK.copy_(cos_TK)
            self.sin_TK.copy_(sin_TK)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        document_BT: Tensor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        cache: list[LayerCache] | None = None,
    ) -> Tensor:
        """Logits [B, T, V]; with targets their cross-entropy in nats, fp32: the mean, the sum, or each of [B, T]
        (`reduction`), over the targets that are not IGNORED.

        `document_BT` (see `document_ids`) keeps attention inside a document. Positions stay those of the sequence:
        rotary attention sees only their differences. `cache` (one for each layer, see `generate`) holds the positions
        before `tokens_BT`; once it does, T is 1. Raises ValueError when all of them do not fit into `shape.context`.
        """
        start = cache[0].positions if cache else 0
        end = start + tokens_BT.shape[1]
        if end > self.shape.context or (start and end != start + 1):
            raise ValueError(
                f"{end - start} tokens after {start} cached positions in a context of {self.shape.context}; "
                "cut the sequence, and after a cache give one token at a time"
            )
        cos_TK, sin_TK = self.cos_TK[start:end], self.sin_TK[start:end]
        mask_B1TS = None
        if document_BT is not None:
            mask_B1TS = (document_BT[:, None, :, None] == document_BT[:, None, None, :]).tril()

        x_BTD = self.model.embed_tokens(tokens_BT)
        for index, layer in enumerate(self.model.layers):
            x_BTD = layer(x_BTD, cos_TK, sin_TK, mask_B1TS, cache[index] if cache else None)
        x_BTD = self.model.norm(x_BTD)
        logits_BTV = F.linear(x_BTD, self.model.embed_tokens.weight) if self.lm_head is None else self.lm_head(x_BTD)

        if targets_BT is None:
            return logits_BTV
        loss = F.cross_entropy(
            logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED, reduction=reduction
        )
        return loss.view_as(targets_BT) if reduction == "none" else loss
