"""Next-token loss: the cross-entropies of the counted tokens.

It is the objective of text and of chat. In rows of chat, only the tokens of the assistant count.
"""

from typing import ClassVar

from torch import Tensor

from holdfast.dataset.vocabulary import UNCOUNTED
from holdfast.objectives.interface import MicroBatch, Need, ObjectiveInputs


class NextToken:
    """See `Objective`. The term is a counted target."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    terms: tuple[str, ...] = ("cross_entropy",)
    weights: tuple[float, ...] = (1.0,)

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        return counted_tokens(rows)[None]

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:  # noqa: ARG002
        """See Objective."""
        return given.losses.sum()[None]


def counted_tokens(rows: Tensor) -> Tensor:
    """The number of targets that count."""
    return (rows[:, 1:] & UNCOUNTED == 0).sum()
