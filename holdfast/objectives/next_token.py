"""Next-token loss: the cross-entropies of the counted tokens.

It is the objective of text and of chat. In rows of chat, only the tokens of the assistant count.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from holdfast.dataset.vocabulary import UNCOUNTED
from holdfast.objectives.interface import TokenLosses
from holdfast.objectives.micro_batches import MicroBatch


class NextToken:
    """See `Objective`. A term is a counted target."""

    needs_reference: ClassVar[bool] = False

    def count(self, rows: Tensor) -> Tensor:
        """See Objective."""
        return (rows[:, 1:] & UNCOUNTED == 0).sum()

    def loss_sum(self, policy: nn.Module, reference: TokenLosses | None, batch: MicroBatch) -> Tensor:  # noqa: ARG002
        """See Objective."""
        loss: Tensor = policy(batch.tokens, batch.targets, batch.segments, reduction="sum")
        return loss
