"""LAMB (You et al. 2020, algorithm 2): Adam's update of a tensor, scaled to the norm of the tensor.

Norms cover whole tensors and are summed over their parts, as the gradient norm is under elastic determinism. So no
division of rows changes them. The state of a weight is that of AdamW. No operation here fuses an addition and a
multiplication, because torch's kernels round it differently where a vector is not full. An element therefore gets the
same bits wherever a shard ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.engines.layout import local
from holdfast.engines.torch.elastic import squared_norms
from holdfast.spec.training import Optimizer


@dataclass(frozen=True)
class Rows:
    """This rank's part of a tensor: rows from `first` on, of `whole` rows. `counted` is true if this rank's copy
    counts in sums."""

    first: int
    whole: int
    counted: bool = True

    def of(self, part: Tensor) -> tuple[Tensor, int, int]:
        """The counted rows of this rank's part, in the form that `squared_norms` takes."""
        return (part if self.counted else part[:0]), self.first, self.whole


class Lamb(torch.optim.Optimizer):
    """The LAMB optimizer. If tensors are sharded, call every method on every rank."""

    def __init__(self, groups: Sequence[dict[str, Any]], settings: Optimizer, rows: Mapping[nn.Parameter, Rows] | None):
        """`groups` are parameter groups with their `weight_decay`. `rows` has the rows of each parameter. None means
        that every rank has all rows."""
        defaults = {"lr": settings.learning_rate, "fused": False}
        super().__init__(groups, defaults)
        self._settings, self._rows = settings, rows

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Run one update. It needs as much extra memory as the parameters. A collective call."""
        beta1, beta2, epsilon = self._settings.beta1, self._settings.beta2, self._settings.epsilon
        updated = [
            (matrix, group["lr"], group["weight_decay"]) for group in self.param_groups for matrix in group["params"]
        ]
        weights, updates = [], []
        for parameter, _, decay in updated:
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
        places = [
            Rows(0, len(matrix)) if self._rows is None else self._rows[parameter]
            for parameter, matrix in zip((parameter for parameter, _, _ in updated), weights, strict=True)
        ]
        parts = [place.of(part) for place, part in zip(places * 2, chain(weights, updates), strict=True)]
        norms = torch.stack(squared_norms(parts, together=self._rows is not None)).sqrt().view(2, -1)
        ratios = torch.where((norms > 0).all(dim=0), norms[0] / norms[1], 1.0)
        for (_, rate, _), weight, update, ratio in zip(updated, weights, updates, ratios, strict=True):
            weight.sub_(update.mul_(ratio * rate))
