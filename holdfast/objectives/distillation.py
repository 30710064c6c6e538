"""Distillation: the model learns the distribution of a teacher's likeliest tokens.

The divergence of a counted target is the KL divergence of the model from the teacher (Hinton et al. 2015), over the
teacher's likeliest tokens and one bucket for all other tokens. So it is never negative. It is 0 only if the model has
the teacher's probabilities. With the whole vocabulary it is the full divergence, as in `trl` (GKD with beta 0).
"""

from typing import ClassVar

import torch
from torch import Tensor

from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import MicroBatch, Need, ObjectiveInputs
from holdfast.objectives.next_token import counted_tokens

LEAST = 2.0**-20  # a bucket below this probability is rounding


class TopKDistillation:
    """See `Objective`. The loss is the divergence plus the cross-entropy of the targets times a weight."""

    needs: ClassVar[frozenset[Need]] = frozenset({"teacher"})
    terms: tuple[str, ...] = ("teacher_divergence", "cross_entropy")

    def __init__(self, hard_weight: float) -> None:
        """`hard_weight` is the weight of the cross-entropy."""
        self.weights: tuple[float, ...] = (1.0, hard_weight)

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        return counted_tokens(rows).expand(2)

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective. The losses of a position are those of the target and of the teacher's tokens."""
        assert given.teacher is not None
        losses, theirs = given.losses.float(), given.teacher.logprobs.float()
        ours = -losses[..., 1:]
        inside = (theirs.exp() * (theirs - ours)).sum(-1)
        rest, our_rest = ((1 - logprobs.exp().sum(-1)).clamp(min=LEAST) for logprobs in (theirs, ours))
        outside = torch.where(rest > LEAST, rest * (rest.log() - our_rest.log()), 0.0)
        divergence = torch.where(batch.targets != IGNORED, inside + outside, 0.0)
        return torch.stack((divergence.sum(), losses[..., 0].sum()))
