"""LAMB (You et al. 2020, algorithm 2): Adam's update of a tensor, as long as the tensor itself is.

The norms that this takes are of whole tensors, summed over their parts as the norm of gradients is under elastic
determinism, so that no cut of rows shows in them. What is kept of a weight is what AdamW keeps. Nothing here adds and
multiplies in one operation, which torch's kernels round otherwise where a vector is not full: an element gets the same
bits wherever a shard ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.components.train.engines.layout import local
from holdfast.components.train.engines.torch.elastic import squared_norms
from holdfast.spec.training import Optimizer


@dataclass(frozen=True)
class Rows:
    """Where this rank's part of a tensor lies: of `whole` rows it has some from `first` on, and `counted` says that it
    is this rank whose copy is counted."""

    first: int
    whole: int
    counted: bool = True

    def of(self, part: Tensor) -> tuple[Tensor, int, int]:
        """What is counted of this rank's part, as `squared_norms` takes it."""
        return (part if self.counted else part[:0]), self.first, self.whole


class Lamb(torch.optim.Optimizer):
    """Every method is called on every rank, where tensors are shared out."""

    def __init__(self, groups: Sequence[dict[str, Any]], settings: Optimizer, rows: Mapping[nn.Parameter, Rows] | None):
        """`groups` of parameters with their `weight_decay`. `rows`: of each; None: every rank has all of them."""
        defaults = {"lr": settings.learning_rate, "fused": False}
        super().__init__(groups, defaults)
        self._settings, self._rows = settings, rows

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update, of as much memory again as the parameters have. A collective call."""
        beta1, beta2, epsilon = self._settings.beta1, self._settings.beta2, self._settings.epsilon
        held = [(each, group["lr"], group["weight_decay"]) for group in self.param_groups for each in group["params"]]
        weights, updates = [], []
        for parameter, _, decay in held:
            assert parameter.grad is not None
            state, gradient, weight = self.state[parameter], local(parameter.grad), local(parameter)
            first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
            state["step"] += 1
            first.mul_(beta1).add_(gradient * (1 - beta1))
            second.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
            update = (second / (1 - beta2 ** state["step"])).sqrt_().add_(epsilon)
            torch.div(first / (1 - beta1 ** state["step"]), update, out=update)
            updates.append(update.add_(weight * decay) if decay else update)
            weights.append(weight)
        places = [Rows(0, len(each)) if self._rows is None else self._rows[parameter] for parameter, each in
                  zip((parameter for parameter, _, _ in held), weights, strict=True)]  # fmt: skip
        parts = [place.of(part) for place, part in zip(places * 2, chain(weights, updates), strict=True)]
        norms = torch.stack(squared_norms(parts, together=self._rows is not None)).sqrt().view(2, -1)
        ratios = torch.where((norms > 0).all(dim=0), norms[0] / norms[1], 1.0)
        for (_, rate, _), weight, update, ratio in zip(held, weights, updates, ratios, strict=True):
            weight.sub_(update.mul_(ratio * rate))
