"""Objective of single answers with a label: KTO (Ethayarajh et al. 2024), as in `trl`.

In a row of an unpaired dataset, every document is a prompt with an answer that is desirable or not. The loss compares
the answer's reward with a reference point: the divergence of the model from its reference on answers to other prompts.
It is at least 0, estimated over the whole global batch, and has no gradient. For it, the answers of a row are moved to
the next prompt of the same row (`mismatched`). So neither micro-batches nor ranks change it.
"""

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, UNCOUNTED, UNDESIRABLE
from holdfast.model.decoder import numbered
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import MicroBatch, Need, ObjectiveInputs
from holdfast.objectives.preference import by_document

UNIT = 2.0**-20  # nats; divergences are added as integers, so that their sum has no order


class UnpairedPreference:
    """See `Objective`. The loss of an answer is its weight times 1 - sigmoid(beta * (r - z)) if it is desirable, and
    1 - sigmoid(beta * (z - r)) if not. r is the model's log-likelihood of the answer minus the reference's, and z the
    divergence."""

    needs: ClassVar[frozenset[Need]] = frozenset({"reference", "divergence", "documents"})
    terms: tuple[str, ...] = ("answer_loss", "desirable_reward", "undesirable_reward", "divergence")
    weights: tuple[float, ...] = (1.0,)

    def __init__(self, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
        """`beta` is the weight of a reward."""
        self._beta, self._weights = beta, (desirable_weight, undesirable_weight)

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        documents = numbered(rows[:, :-1] & ENDS != 0)
        exists, undesirable = _answers(rows[:, 1:], rows[:, 1:] & UNCOUNTED == 0, documents)
        answers = exists.sum()
        return torch.stack((answers, (exists & ~undesirable).sum(), (exists & undesirable).sum(), answers))

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective. The reward of an answer is beta times r."""
        assert given.reference is not None
        assert given.divergence is not None
        assert batch.documents is not None, "the spec requires data.document_masks for answers"
        exists, undesirable = _answers(batch.marks, batch.targets != IGNORED, batch.documents)
        reward = self._beta * by_document(given.reference.float() - given.losses.float(), batch.documents)
        distance = reward - self._beta * given.divergence
        desirable_weight, undesirable_weight = self._weights
        losses = torch.where(
            undesirable, undesirable_weight * (1 - (-distance).sigmoid()), desirable_weight * (1 - distance.sigmoid())
        )
        gained = reward.detach()
        return torch.stack(
            (
                torch.where(exists, losses, 0.0).sum(),
                torch.where(exists & ~undesirable, gained, 0.0).sum(),
                torch.where(exists & undesirable, gained, 0.0).sum(),
                given.divergence * exists.sum(),
            )
        )


def _answers(marks: Tensor, counted: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Which documents have an answer, and which answers are undesirable: [B, documents] each."""
    exists = by_document(counted.float(), documents) > 0
    return exists, by_document((counted & (marks & UNDESIRABLE != 0)).float(), documents) > 0


def mismatched(rows: Tensor) -> Tensor:
    """Rows in which every prompt has the answer of the prompt before it, and the first prompt that of the last one. A
    row keeps its length. Nothing counts in a row with a single answer."""
    moved = rows.clone()
    for row, result in zip(rows, moved, strict=True):
        bounds = [0, *((row[:-1] & ENDS).nonzero()[:, 0] + 1).tolist()]
        first = [
            (start, start + int(counted[0]), end)
            for start, end in pairwise(bounds)
            if len(counted := (row[start:end] & UNCOUNTED == 0).nonzero()[:, 0])
        ]
        if len(first) < 2:
            torch.bitwise_or(row, UNCOUNTED, out=result)
            continue
        at, parts = 0, []
        for (start, answer, end), (_, other, other_end) in zip(first, [first[-1], *first[:-1]], strict=True):
            parts += [row[at:start], row[start:answer], row[other:other_end]]
            at = end
        parts.append(row[at:])
        torch.cat(parts, out=result)
    return moved


def divergence_sums(given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
    """The sum over the answers of a micro-batch of `mismatched` rows: of their log-likelihood under the model minus
    that under the reference in UNIT, and their number. int64 [2]."""
    assert given.reference is not None
    assert batch.documents is not None
    ratios = by_document(given.reference.double() - given.losses.double(), batch.documents)
    exists = by_document((batch.targets != IGNORED).float(), batch.documents) > 0
    return torch.stack(((ratios / UNIT).round().long()[exists].sum(), exists.sum()))


def divergence_of(sums: Tensor) -> Tensor:
    """The divergence from the sums of a global batch: an fp32 scalar, at least 0."""
    return (sums[0] * UNIT / sums[1].clamp(min=1)).clamp(min=0).float()
