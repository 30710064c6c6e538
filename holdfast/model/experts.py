"""The feed-forward layer of a mixture of experts: a router sends each token to some experts, each a SwiGLU of its own.

Promises that no token is dropped, however many want one expert, and that every sum has a fixed order: tokens are sorted
by expert and brought back, and where a token's experts come together, they do in the order of its choice. Nothing is
scattered. `published` has the names of the files that people publish.

An expert is a run of rows of two matrices (gate and up of width F, one after the other; down), so that first weights,
shards and checkpoints are those of any matrix.

Shape suffixes, beside those of `decoder`: E experts, C choices of a token, S rows of tokens sent (N times C).
"""

# ruff: noqa: N803, N806, N815 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.spec.model import Model

CORRECTION = "e_score_correction_bias"  # what a router adds to scores, and no gradient changes


class Load(NamedTuple):
    """How the tokens of a micro-batch were shared out in one layer."""

    unevenness_B: Tensor  # of each sequence, or of the part of it that is here; see `Router`
    tokens_E: Tensor  # how many went to each expert


class Permuted(torch.autograd.Function):
    """Rows in another order. Its backward pass takes them back: what indexing does there adds up in any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """`order` says which row comes where, and `inverse` undoes it."""
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
    """Whether a token's choices are put into the order of their scores, in which their results are added. Accelerators
    leave them in any order else; a CPU leaves them in the same one every time, that of `transformers` for dots1."""
    return not biased or device.type != "cpu"


class Router(nn.Module):
    """Scores of experts for each token, in fp32, and the best of them.

    Scores are a softmax over experts, or (`biased`) each expert's sigmoid, to which a bias is added for the choice and
    not for the weights (DeepSeek-V3, Liu et al. 2024, equation 16). Unevenness is that of the Switch Transformer (Fedus
    et al. 2021, equations 4 to 6), of one sequence at a time, over C: 1 when all experts are equally busy. Of sequences
    that are cut among ranks each has a part: its tokens' scores, times how many tokens of the whole sequence each
    expert had. That is a count, through which no gradient goes, so the gradients of the parts are those of the whole.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.choices, self.normalise, self.biased = shape.routing.top_k, shape.normalised, shape.biased_routing
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear
        self._parts, self._add_up = 1, list[Callable[[Tensor], Tensor]]()
        self.tokens_E: Tensor | None = None  # sent to each expert since they were counted last; no part of the state
        if self.biased:
            self.register_buffer(CORRECTION, torch.empty(shape.experts))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Load]:
        """Experts and their weights [N, C], and how they were shared out."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_NE = self.project(x_BTD.flatten(0, 1).float(), self.weight.float())
        scores_NE = logits_NE.sigmoid() if self.biased else logits_NE.softmax(-1)
        wanted_NE = scores_NE + getattr(self, CORRECTION) if self.biased else scores_NE
        chosen_NC = wanted_NE.topk(self.choices, sorted=in_order(wanted_NE.device, biased=self.biased)).indices
        weight_NC = scores_NE.gather(1, chosen_NC)
        if self.normalise:
            weight_NC = weight_NC / (weight_NC.sum(-1, keepdim=True) + (1e-20 if self.biased else 0.0))
        shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True) if self.biased else scores_NE
        return chosen_NC, weight_NC, self._load(chosen_NC, shares_NE, len(x_BTD))

    def cut(self, parts: int, add_up: Callable[[Tensor], Tensor]) -> None:
        """Every sequence, or the part of it that came here before, is cut among so many ranks, over which `add_up` adds
        counts up."""
        self._parts *= parts
        self._add_up.append(add_up)

    def count(self, load: Load) -> None:
        """Remember how tokens were shared out, where the bias is moved by it."""
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


def grouped(x_SD: Tensor, ends_E: Tensor, gate_up: Tensor, down: Tensor, hidden: int) -> Tensor:
    """Rows, sorted by their experts and each expert's ending at one of `ends_E`, through them: as many rows."""
    gate_SF, up_SF = _product(x_SD, gate_up, 2 * down.shape[1], ends_E).chunk(2, dim=-1)
    return _product(F.silu(gate_SF) * up_SF, down, hidden, ends_E)


def _product(x: Tensor, weight: Tensor, width: int, ends_E: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    each = weight.unflatten(0, (-1, width))
    if not len(x):  # none of these experts is wanted
        return F.linear(x, each[0])
    return F.grouped_mm(x, each.transpose(1, 2), offs=ends_E.to(torch.int32))


class Experts(nn.Module):
    """The experts of a layer. `compute` is how rows that are sorted by expert go through them."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.experts = shape.experts
        self.compute: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] = grouped
        self.gate_up_proj = nn.Parameter(torch.empty(shape.experts * 2 * shape.ffn_width, shape.hidden))
        self.down_proj = nn.Parameter(torch.empty(shape.experts * shape.hidden, shape.ffn_width))

    def forward(self, x_ND: Tensor, chosen_NC: Tensor, weight_NC: Tensor) -> Tensor:
        """The sum of what each token's experts make of it, weighted: [N, D]."""
        choices = chosen_NC.shape[1]
        expert_S, order_S = chosen_NC.flatten().sort(stable=True)
        ends_E = torch.searchsorted(expert_S, torch.arange(self.experts, device=expert_S.device), right=True)
        x_SD, inverse_S = permuted(x_ND[:, None].expand(-1, choices, -1).flatten(0, 1), order_S)
        y_SD = self.compute(x_SD, ends_E, self.gate_up_proj, self.down_proj, x_SD.shape[1])
        y_NCD = Permuted.apply(y_SD, inverse_S, order_S).unflatten(0, (-1, choices))
        return (y_NCD * weight_NC[..., None]).sum(1).to(x_ND.dtype)
