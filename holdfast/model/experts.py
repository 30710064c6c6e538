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

from holdfast.model import nf4
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


class Matrix(NamedTuple):
    """A matrix of some experts, each one below the other, with their biases and adapters."""

    stored: tuple[Tensor, ...]  # the weights, or the codes and scales of NF4
    bias: Tensor | None = None
    adapter: tuple[Tensor, ...] = ()  # the first and the second matrix of each expert's adapter
    scale: float = 1.0  # of the adapters' products

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Matrix:
        """The same with changed tensors."""
        bias = None if self.bias is None else change(self.bias)
        return Matrix(tuple(map(change, self.stored)), bias, tuple(map(change, self.adapter)), self.scale)


class Matrices(NamedTuple):
    """The weights of some experts, and the activation between them."""

    gate_up: Matrix
    down: Matrix
    clamped: bool = False  # the SwiGLU of gpt-oss; its gate and up alternate

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Matrices:
        """The same with changed tensors."""
        return Matrices(self.gate_up.with_tensors(change), self.down.with_tensors(change), self.clamped)


def grouped(x_SD: Tensor, ends_E: Tensor, weights: Matrices) -> Tensor:
    """Pass rows that are sorted by expert through their experts. Each expert's rows end at one of `ends_E`. Returns
    the same number of rows."""
    both_SF = _linear(x_SD, ends_E, weights.gate_up)
    if weights.clamped:
        gate_SF, up_SF = both_SF[..., ::2].clamp(max=CLAMP), both_SF[..., 1::2].clamp(-CLAMP, CLAMP)
        inner_SF = (up_SF + 1) * (gate_SF * torch.sigmoid(gate_SF * SIGMOID_GAIN))
    else:
        gate_SF, up_SF = both_SF.chunk(2, dim=-1)
        inner_SF = F.silu(gate_SF) * up_SF
    return _linear(inner_SF, ends_E, weights.down)


def _linear(x: Tensor, ends_E: Tensor, matrix: Matrix) -> Tensor:
    is_narrow = len(matrix.stored) > 1 or matrix.stored[0].itemsize < _wide(x).itemsize
    y = (
        _FrozenGroupedProduct.apply(x.to(_wide(x)), ends_E, *matrix.stored)
        if is_narrow
        else _product(x, matrix.stored[0], ends_E)
    )
    if matrix.bias is not None:
        y = y + _bias(y, matrix.bias, ends_E)
    if matrix.adapter:
        first, second = matrix.adapter
        y = y + _product(_product(x, first, ends_E), second, ends_E) * matrix.scale
    return y


class _FrozenGroupedProduct(torch.autograd.Function):
    """Rows times the matrices of their experts, which are saved for the backward pass as they are stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends_E: Tensor, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E, *stored)
        return _grouped_product(x, nf4.expand(stored, x.dtype), ends_E)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ends_E, *stored = ctx.saved_tensors
        weight = nf4.expand(stored, gradient.dtype)
        return _grouped_product(gradient.contiguous(), weight, ends_E, transposed=False), None, *(None for _ in stored)


def _bias(like_SF: Tensor, bias: Tensor, ends_E: Tensor) -> Tensor:
    """Each row's bias. It is a product with one column of ones, so the gradient is a sum in a fixed order. The other
    columns are padding to the 16 bytes that the product needs."""
    ones_S8 = torch.zeros(len(like_SF), 8, dtype=like_SF.dtype, device=like_SF.device)
    ones_S8[:, 0] = 1
    return _product(ones_S8, F.pad(bias.to(like_SF.dtype)[:, None], (0, 7)), ends_E)


def _product(x: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    return _grouped_product(x.to(_wide(x)), weight.to(_wide(x)), ends_E)


def _wide(x: Tensor) -> torch.dtype:
    """The type of a product with `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _grouped_product(x: Tensor, weight: Tensor, ends_E: Tensor, *, transposed: bool = True) -> Tensor:
    """Each row of `x` times the matrix of its expert, which is transposed as in a linear layer."""
    weights = weight.unflatten(0, (len(ends_E), -1))
    weights = weights.transpose(1, 2) if transposed else weights
    if not len(x):  # no token chose one of these experts
        return x @ weights[0]
    return F.grouped_mm(x, weights, offs=ends_E.to(torch.int32))


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

    def matrices(self) -> Matrices:
        """The weights of all experts on this rank."""
        gate_up = Matrix((self.gate_up_proj,), self.gate_up_proj_bias)
        return Matrices(gate_up, Matrix((self.down_proj,), self.down_proj_bias), self.clamped)

    def forward(self, x_ND: Tensor, chosen_NC: Tensor, weight_NC: Tensor, matrices: Matrices | None = None) -> Tensor:
        """The weighted sum of the outputs of each token's experts: [N, D]. `matrices` replaces those of the layer."""
        choices = chosen_NC.shape[1]
        expert_S, order_S = chosen_NC.flatten().sort(stable=True)
        ends_E = torch.searchsorted(expert_S, torch.arange(self.experts, device=expert_S.device), right=True)
        x_SD, inverse_S = permuted(x_ND[:, None].expand(-1, choices, -1).flatten(0, 1), order_S)
        y_SD = self.compute(x_SD, ends_E, matrices or self.matrices())
        y_NCD = Permuted.apply(y_SD, inverse_S, order_S).unflatten(0, (-1, choices))
        return (y_NCD * weight_NC[..., None]).sum(1).to(x_ND.dtype)
