"""Interface between an engine and the objective of a step.

A step minimizes a sum over the global batch, divided by an integer: the number of its terms. The objective defines the
terms. The engine divides the batch among ranks and micro-batches, and adds the sums. So a result does not depend on the
division, which a mean of means would.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from holdfast.objectives.micro_batches import MicroBatch

ObjectiveName = Literal["next_token", "dpo"]


class TokenLosses(Protocol):
    """A model that returns the loss of each target, [B, T], without a gradient."""

    def __call__(self, batch: MicroBatch) -> Tensor:
        """The losses of a micro-batch."""


class Objective(Protocol):
    """What a step minimizes."""

    needs_reference: ClassVar[bool]  # whether `loss_sum` needs the losses of a frozen reference model

    def count(self, rows: Tensor) -> Tensor:
        """The number of terms in `rows`: an integer scalar on their device. `rows` are [rows, context + 1] ids with
        their marks (see `dataset.vocabulary`)."""

    def loss_sum(self, policy: nn.Module, reference: TokenLosses | None, batch: MicroBatch) -> Tensor:
        """The sum of the terms of a micro-batch, in fp32. `policy` is the model that is trained, or this rank's part
        of it."""


def count_terms(objective: Objective, rows: Tensor, contributes: bool = True) -> Tensor:
    """The number of terms in the global batch, of which `rows` are this rank's: an fp32 scalar on their device. Of
    ranks with the same rows, `contributes` is true on one. A collective call. The result is at least 1, so a batch
    without terms has the loss 0."""
    counted = objective.count(rows) * contributes
    if dist.is_initialized():
        dist.all_reduce(counted)
    return counted.clamp(min=1).float()
