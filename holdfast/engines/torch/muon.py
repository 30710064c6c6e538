"""Muon (Jordan et al. 2024): the momentum of a hidden matrix, orthogonalized; AdamW for all other parameters.

A rank gathers the whole momentum of a matrix, orthogonalizes it, and applies its own part. So every rank multiplies the
same matrices of the same shapes, and no layout changes a bit. The momentum is sharded like the weights. Outside the
products no operation fuses an addition and a multiplication (see `lamb`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.engines.layout import TensorLayout, like, local
from holdfast.spec.training import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in torch.optim.Muon
LEAST_NORM = 1e-7
BY_MUON = "muon"  # key of a parameter group


class Muon(torch.optim.Optimizer):
    """Muon for the groups with BY_MUON, and AdamW for the rest. If tensors are sharded, call `step` on every rank."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], settings: Optimizer, blocks: Mapping[nn.Parameter, int], *, rest: Any
    ) -> None:
        """`blocks` is the number of matrices in each parameter of Muon: one below the other, of equal size. `rest`
        makes the optimizer of the other groups, or is not called without them."""
        super().__init__(list(groups), {"lr": settings.learning_rate, "fused": False})
        self._settings, self._blocks = settings.muon, blocks
        others = self._others()
        self._rest = rest([dict(group) for group in others]) if others else None
        if self._rest is not None:
            self._rest.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Run one update. A collective call."""
        for group in filter(lambda group: group[BY_MUON], self.param_groups):
            for parameter in group["params"]:
                self._update(parameter, group["lr"], group["weight_decay"])
        if self._rest is not None:
            for own, shared in zip(self._rest.param_groups, self._others(), strict=True):
                own["lr"] = shared["lr"]
            self._rest.step()

    def _others(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group[BY_MUON]]

    def _update(self, parameter: nn.Parameter, rate: float, decay: float) -> None:
        assert parameter.grad is not None
        state, kept = self.state[parameter], self._settings.momentum
        gradient, momentum, weight = map(local, (parameter.grad, state["momentum_buffer"], parameter))
        state["step"] += 1
        fresh = gradient * (1 - kept)
        momentum.mul_(kept).add_(fresh)
        direction = (momentum * kept).add_(fresh) if self._settings.nesterov else momentum.clone()
        whole = like(parameter, direction)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        update = self._orthogonal_part(parameter, whole)
        rows, columns = len(whole) // self._blocks[parameter], whole.shape[1]
        weight.mul_(1 - rate * decay).sub_(update.mul_(rate * scale_of(rows, columns, self._settings.scaling)))

    def _orthogonal_part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of the orthogonalized matrices, fp32. It computes only those that it has rows of."""
        (top, left), (rows, columns) = TensorLayout.of("", parameter).part()
        height = len(whole) // self._blocks[parameter]
        part = whole.new_empty(rows, columns)
        for first in range(top // height * height, top + rows, height):
            matrix = orthogonalized(whole[first : first + height], self._settings.iterations)
            low, high = max(top, first), min(top + rows, first + height)
            part[low - top : high - top] = matrix[low - first : high - first, left : left + columns]
        return part


def scale_of(rows: int, columns: int, scaling: str) -> float:
    """The factor of the learning rate of a matrix. `match_rms_adamw` makes the update about as large as AdamW's (Liu
    et al. 2025)."""
    return 0.2 * math.sqrt(max(rows, columns)) if scaling == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def orthogonalized(matrix: Tensor, iterations: int) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, about: Newton-Schulz iterations in bf16, as in
    torch.optim.Muon."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16().contiguous().clone()  # new memory, so that kernels see one alignment
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
