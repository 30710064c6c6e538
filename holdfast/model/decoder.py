"""Decoder of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and a tied or untied head.

The switches of a family (`spec.model.Preset`) and of each layer (`LayerShape`) select windows, biases, norms, rotation,
the activation, sinks and mixtures of experts (`experts`). `state_dict()` has the names of Llama in Hugging Face's
layout, which the families share. The arithmetic is deterministic if torch is configured so. `initialise` makes the
first weights. Engines handle precision and sharding, and parameters are fp32 here.

Shape suffixes: B batch, T tokens, S positions of keys (T plus cached ones), D hidden, F feed-forward width, V
vocabulary, N tokens of all sequences, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.model.attention.rows import prepare_rows
from holdfast.model.attention.segments import Segments
from holdfast.model.layers import Embedding, Layer, LayerCache, Linear, Mixture, norm_of
from holdfast.model.rotary import rotary_tables
from holdfast.model.token_logprobs import CHUNK, IGNORED, Likeliest, likeliest_tokens, token_logprobs
from holdfast.spec.model import Model, RopeScaling

# ruff: noqa: N803, N806, N815 - shape suffixes are upper case

SCORE = "score.weight"  # name of a scalar head


def document_ids(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """Number the documents packed into each sequence: [B, T], from 0. An end-of-text token belongs to the document
    that it ends."""
    return numbered(tokens_BT == end_of_text)


def numbered(ends_BT: Tensor) -> Tensor:
    """Number the documents by their end marks: [B, T], from 0."""
    return ends_BT.cumsum(dim=1) - ends_BT.long()


class Trunk(nn.Module):
    """Embedding, layers and the last norm, which Hugging Face calls `model`. `Decoder` runs it."""

    def __init__(self, shape: Model, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in shape.layer_shapes())
        self.norm = norm_of(shape, shape.hidden)


class Charged(torch.autograd.Function):
    """The residual stream, unchanged. The gradient of the charge is always 1."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, charge: Tensor) -> Tensor:
        """Return the same numbers."""
        ctx.one = torch.ones_like(charge)
        return x_BTD.clone()  # FSDP2 does not accept a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the stream and of the charge."""
        return gradients[0], ctx.one


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
        self.compiled = False  # whether layers are compiled, and what the loss does with logits
        self.local_segments: Callable[[Segments], Any] = lambda segments: segments  # what attention on this rank takes
        self.add_up: Callable[[Tensor], Tensor] | None = None  # sums counts over the ranks with the other positions
        self.top: int | None = None  # of a teacher: `forward` returns this number of likeliest tokens, and no losses
        self.temperature = 1.0  # of a distillation: divides the logits of all but the first target of a position
        self.charge_share: Tensor | None = None  # of a sequence's charge in the loss; None: it comes with the losses
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
    ) -> Tensor | Likeliest:
        """Logits [B, T, V]. With targets, their cross-entropy in nats, fp32, over the targets that are not IGNORED:
        the mean, the sum, or each (`reduction`), without the logits of all tokens. Targets are [B, T], or several of a
        position. With `top`, that number of the likeliest tokens after each position. A scalar head gives one
        number for each token instead: fp32 [B, T]. See `hidden` for the remaining parameters."""
        x_BTD, unevenness_B = self._hidden(tokens_BT, segments, cache)
        if self.score is not None:
            return self.rewards(x_BTD)
        if self.top is not None:
            return self.likeliest(self._tempered(x_BTD), self.top)
        return self.head(x_BTD) if targets_BT is None else self.loss(x_BTD, targets_BT, reduction, unevenness_B)

    def rewards(self, x_BTD: Tensor) -> Tensor:
        """The numbers of a scalar head from the output of `hidden`: fp32 [B, T]. Tensor parallelism replaces this
        function, and the next two."""
        assert self.score is not None
        rewards_BT: Tensor = self.score(x_BTD)[..., 0].float().clone()  # FSDP2 does not accept a view
        return rewards_BT

    def likeliest(self, x_BTD: Tensor, count: int) -> Likeliest:
        """The `count` likeliest tokens after each position, from the output of `hidden`."""
        return likeliest_tokens(*self._head_inputs(x_BTD), count, self.loss_chunk)

    def _tempered(self, x_BTD: Tensor) -> Tensor:
        """The input of the head whose logits are divided by the temperature."""
        return x_BTD if self.temperature == 1 else x_BTD * (1 / self.temperature)

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
        if self.temperature == 1 or targets_BT.dim() == 2:
            losses_BT = -self.logprobs(x_BTD, targets_BT)
        else:
            actual_BT1, theirs_BTK = targets_BT.split((1, targets_BT.shape[2] - 1), 2)
            logprobs = self.logprobs(x_BTD, actual_BT1), self.logprobs(self._tempered(x_BTD), theirs_BTK)
            losses_BT = -torch.cat(logprobs, 2)
        charge_B = self.charge(unevenness_B, targets_BT)
        if charge_B is not None:  # its gradient comes with the first loss of each sequence
            losses_BT = torch.cat((losses_BT[:, :1] + (charge_B - charge_B.detach())[:, None], losses_BT[:, 1:]), 1)
        if reduction == "none":
            return losses_BT
        loss = losses_BT.sum()
        return loss / (targets_BT != IGNORED).sum() if reduction == "mean" else loss

    def logprobs(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """The log-probabilities of targets from the output of `hidden`: fp32 [B, T], 0 where IGNORED."""
        inputs = self._head_inputs(x_BTD)
        return token_logprobs(*inputs, targets_BT, chunk=self.loss_chunk, compiled=self.compiled)

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
        experts in each sequence [B]. A pipeline stage has only some layers. With `charge_share` the gradient of the
        stream includes the charge of the unevenness, which is then None."""
        positions: slice | Tensor = slice(start, end)
        if self.positions_T is not None:
            positions, end = self.positions_T, self.shape.context
        main = self.cos_TK[positions], self.sin_TK[positions]
        local = (self.local_cos_TK[positions], self.local_sin_TK[positions]) if self.shape.preset.local_rope else main
        if segments is None:
            segments = Segments.of_rows(len(x_BTD), end - start)
        segments = self.local_segments(segments)
        if self.compiled and isinstance(segments, Segments):
            prepare_rows(segments, x_BTD.device)
        unevenness_B = None
        for index, layer in enumerate(self.model.layers):
            if layer is not None:
                cos_TK, sin_TK = local if self.layer_shapes[index].rope == "local" else main
                x_BTD, load = layer(x_BTD, cos_TK, sin_TK, segments, cache[index] if cache else None)
                if self.training and isinstance(layer.mlp, Mixture):
                    layer.mlp.gate.count(load)  # not within the layer, which may be computed twice
                    unevenness_B = load.unevenness_B if unevenness_B is None else unevenness_B + load.unevenness_B
        if self.charge_share is None or unevenness_B is None:
            return x_BTD, unevenness_B
        if self.shape.routing.balance == "auxiliary":
            charge = self.shape.routing.coefficient * self.charge_share * unevenness_B.sum()
            x_BTD = Charged.apply(x_BTD, charge)
        return x_BTD, None

    def head(self, x_BTD: Tensor) -> Tensor:
        """Logits [B, T, V] from the output of `hidden`. Positions are independent, so they may come in parts."""
        return F.linear(x_BTD, self.head_weight) if self.lm_head is None else self.lm_head(x_BTD)
