"""Mixture of experts as a feed-forward layer: a router sends each token to some experts, each a separate SwiGLU.

No token is dropped, even if many tokens choose one expert. Every sum has a fixed order: tokens are sorted by expert and
restored. The outputs of a token's experts are added in the order of its choice. Nothing is scattered. `published` has
the names in published files.

An expert is a run of rows of two matrices: gate and up of width F, one after the other (gpt-oss: alternately), and
down. So first weights, shards and checkpoints treat them as any matrix. Biases of experts are runs of two vectors.

Shape suffixes, in addition to those of `decoder`: E experts, C choices of a token, S rows of sent tokens (N times C).
"""

# ruff: noqa: N803, N806, N815 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.spec.model import Model

CORRECTION = "e_score_correction_bias"  # a router's bias on scores, which no gradient changes
CLAMP, SIGMOID_GAIN = 7.0, 1.702  # of gpt-oss


class Load(NamedTuple):
    """The distribution of a micro-batch's tokens over the experts of one layer."""

    unevenness_B: Tensor  # of each sequence, or of its local part; see `Router`
    tokens_E: Tensor  # number of tokens sent to each expert


class Permuted(torch.autograd.Function):
    """Rows in another order. Its backward pass restores the order: the gradient of indexing would add in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """`order` has the source row of each result row, and `inverse` undoes it."""
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient in the former order."""
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


def permuted(x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `x` in an order, and the order that undoes it."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return Permuted.apply(x, order, inverse), inverse


def in_order(device: torch.device, *, biased: bool) -> bool:
    """Whether a token's choices are sorted by score, which is the order in which their results are added.
    Accelerators would otherwise leave them in any order. A CPU gives the same order every time, that of
    `transformers` for dots1."""
    return not biased or device.type != "cpu"


class Router(nn.Module):
    """Scores of experts for each token, in fp32, and the best experts.

    Scores are a softmax over experts, or (`biased`) each expert's sigmoid. A bias is added for the choice and not for
    the weights (DeepSeek-V3, Liu et al. 2024, equation 16). With groups, only experts of the best groups are chosen: a
    group is as good as its two best experts. gpt-oss takes the softmax over the chosen experts only.

    Unevenness is that of the Switch Transformer (Fedus et al. 2021, equations 4 to 6) per sequence, over C: 1 if all
    experts are equally busy. For sequences that are split over ranks, each rank has a part: the scores of its tokens,
    times each expert's tokens in the whole sequence. That factor is a count without a gradient, so the gradients of the
    parts are those of the whole.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.choices, self.normalise, self.biased = shape.routing.top_k, shape.normalised, shape.biased_routing
        self.groups, self.top_groups, self.scale = shape.routing.groups, shape.routing.top_groups, shape.routing.scale
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.bias = nn.Parameter(torch.empty(shape.experts)) if shape.preset.router == "chosen" else None
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.whole: Callable[[Tensor], Tensor] = _same  # the bias as a plain tensor
        self._parts, self._add_up = 1, list[Callable[[Tensor], Tensor]]()
        self.tokens_E: Tensor | None = None  # sent to each expert since the last count; not part of the state
        if self.biased:
            self.register_buffer(CORRECTION, torch.empty(shape.experts))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Load]:
        """Experts and their weights [N, C], and the load."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_NE = self.project(x_BTD.flatten(0, 1).float(), self.weight.float())
            if self.bias is not None:
                logits_NE = logits_NE + self.whole(self.bias).float()
        scores_NE = logits_NE.sigmoid() if self.biased else logits_NE.softmax(-1)
        wanted_NE = self._in_best_groups(scores_NE + getattr(self, CORRECTION)) if self.biased else scores_NE
        chosen_NC = wanted_NE.topk(self.choices, sorted=in_order(wanted_NE.device, biased=self.biased)).indices
        weight_NC = scores_NE.gather(1, chosen_NC)
        if self.normalise:
            weight_NC = weight_NC / (weight_NC.sum(-1, keepdim=True) + (1e-20 if self.biased else 0.0))
        if self.scale != 1:
            weight_NC = weight_NC * self.scale
        shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True) if self.biased else scores_NE
        return chosen_NC, weight_NC, self._load(chosen_NC, shares_NE, len(x_BTD))

    def _in_best_groups(self, wanted_NE: Tensor) -> Tensor:
        """The scores, minus infinity outside the best groups."""
        if self.groups == 1:
            return wanted_NE
        wanted_NGE = wanted_NE.unflatten(-1, (self.groups, -1))
        best_NG = wanted_NGE.topk(min(2, wanted_NGE.shape[-1])).values.sum(-1).topk(self.top_groups).indices
        chosen_NG = (best_NG[..., None] == torch.arange(self.groups, device=best_NG.device)).any(-2)
        return wanted_NGE.masked_fill(~chosen_NG[..., None], -torch.inf).flatten(-2)

    def cut(self, parts: int, add_up: Callable[[Tensor], Tensor]) -> None:
        """Split every sequence, or the part of it from an earlier call, over `parts` ranks. `add_up` sums counts
        over them."""
        self._parts *= parts
        self._add_up.append(add_up)

    def count(self, load: Load) -> None:
        """Accumulate the load, if it changes the bias."""
        if self.biased:
            self.tokens_E = load.tokens_E if self.tokens_E is None else self.tokens_E + load.tokens_E

    def _load(self, chosen_NC: Tensor, shares_NE: Tensor, sequences: int) -> Load:
        experts = shares_NE.shape[1]
        of_each = chosen_NC.view(sequences, -1, 1) == torch.arange(experts, device=chosen_NC.device)
        tokens_BE = of_each.sum(1)
        whole_BE = tokens_BE
        for add_up in self._add_up:
            whole_BE = add_up(whole_BE)
        used_BE = whole_BE.float() / (of_each.shape[1] * self._parts)
        shares_BE = shares_NE.view(sequences, -1, experts).mean(1) / self._parts
        return Load(experts * (used_BE * shares_BE).sum(1), tokens_BE.sum(0))


def _same(x: Tensor) -> Tensor:
    return x


class Matrices(NamedTuple):
    """The weights of some experts, each one below the other, and the activation between them."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamped: bool = False  # the SwiGLU of gpt-oss; its gate and up alternate

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Matrices:
        """The same with changed tensors."""
        gate_up_bias, down_bias = (
            None if bias is None else change(bias) for bias in (self.gate_up_bias, self.down_bias)
        )
        return Matrices(change(self.gate_up), change(self.down), gate_up_bias, down_bias, self.clamped)


def grouped(x_SD: Tensor, ends_E: Tensor, weights: Matrices) -> Tensor:
    """Pass rows that are sorted by expert through their experts. Each expert's rows end at one of `ends_E`. Returns
    the same number of rows."""
    both_SF = _product(x_SD, weights.gate_up, 2 * weights.down.shape[1], ends_E)
    if weights.gate_up_bias is not None:
        both_SF = both_SF + _bias(both_SF, weights.gate_up_bias, ends_E)
    if weights.clamped:
        gate_SF, up_SF = both_SF[..., ::2].clamp(max=CLAMP), both_SF[..., 1::2].clamp(-CLAMP, CLAMP)
        inner_SF = (up_SF + 1) * (gate_SF * torch.sigmoid(gate_SF * SIGMOID_GAIN))
    else:
        gate_SF, up_SF = both_SF.chunk(2, dim=-1)
        inner_SF = F.silu(gate_SF) * up_SF
    y_SD = _product(inner_SF, weights.down, x_SD.shape[1], ends_E)
    return y_SD if weights.down_bias is None else y_SD + _bias(y_SD, weights.down_bias, ends_E)


def _bias(like_SF: Tensor, bias: Tensor, ends_E: Tensor) -> Tensor:
    """Each row's bias. It is a product with one column of ones, so the gradient is a sum in a fixed order. The other
    columns are padding to the 16 bytes that the product needs."""
    ones_S8 = torch.zeros(len(like_SF), 8, dtype=like_SF.dtype, device=like_SF.device)
    ones_S8[:, 0] = 1
    return _product(ones_S8, F.pad(bias.to(like_SF.dtype)[:, None], (0, 7)), like_SF.shape[1], ends_E)


def _product(x: Tensor, weight: Tensor, width: int, ends_E: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    weights = weight.unflatten(0, (-1, width))
    if not len(x):  # no token chose one of these experts
        return F.linear(x, weights[0])
    return F.grouped_mm(x, weights.transpose(1, 2), offs=ends_E.to(torch.int32))


class Experts(nn.Module):
    """The experts of a layer. `compute` passes rows sorted by expert through them."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.experts = shape.experts
        self.clamped = shape.preset.activation == "clamped"
        self.compute: Callable[[Tensor, Tensor, Matrices], Tensor] = grouped
        rows, hidden = shape.experts * 2 * shape.ffn_width, shape.experts * shape.hidden
        self.gate_up_proj = nn.Parameter(torch.empty(rows, shape.hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(rows)) if self.clamped else None
        self.down_proj = nn.Parameter(torch.empty(hidden, shape.ffn_width))
        self.down_proj_bias = nn.Parameter(torch.empty(hidden)) if self.clamped else None

    def forward(self, x_ND: Tensor, chosen_NC: Tensor, weight_NC: Tensor) -> Tensor:
        """The weighted sum of the outputs of each token's experts: [N, D]."""
        choices = chosen_NC.shape[1]
        expert_S, order_S = chosen_NC.flatten().sort(stable=True)
        ends_E = torch.searchsorted(expert_S, torch.arange(self.experts, device=expert_S.device), right=True)
        x_SD, inverse_S = permuted(x_ND[:, None].expand(-1, choices, -1).flatten(0, 1), order_S)
        weights = Matrices(self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias, self.clamped)
        y_SD = self.compute(x_SD, ends_E, weights)
        y_NCD = Permuted.apply(y_SD, inverse_S, order_S).unflatten(0, (-1, choices))
        return (y_NCD * weight_NC[..., None]).sum(1).to(x_ND.dtype)
