"""Preference loss: direct preference optimization (Rafailov et al. 2023), in its sigmoid form, as in `trl`.

In a row of a preference dataset, every even document is a chosen answer. The next document is the rejected answer to
the same prompt. The loss of a step is the sum over the pairs of the global batch, divided by their number.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.dataset.vocabulary import ENDS, UNCOUNTED
from holdfast.model.decoder import numbered
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import TokenLosses
from holdfast.objectives.micro_batches import MicroBatch


class DirectPreference:
    """See `Objective`. A term is a pair of answers."""

    needs_reference: ClassVar[bool] = True

    def __init__(self, beta: float) -> None:
        """`beta` is the weight of a margin. See `preference_loss`."""
        self._beta = beta

    def count(self, rows: Tensor) -> Tensor:
        """See Objective."""
        documents = numbered(rows[:, :-1] & ENDS != 0)
        counts = by_document((rows[:, 1:] & UNCOUNTED == 0).float(), documents)
        return (counts[:, 0::2] > 0).sum()

    def loss_sum(self, policy: nn.Module, reference: TokenLosses | None, batch: MicroBatch) -> Tensor:
        """See Objective."""
        assert reference is not None
        assert batch.documents is not None, "the spec requires data.document_masks for pairs"
        before = reference(batch)
        losses = policy(batch.tokens, batch.targets, batch.segments, reduction="none")
        return preference_loss(losses, before, batch.targets, batch.documents, self._beta)


def preference_loss(losses: Tensor, reference: Tensor, targets: Tensor, documents: Tensor, beta: float) -> Tensor:
    """The sum over the pairs of -log sigmoid(beta * margin). `losses` and `reference` are the targets'
    cross-entropies under the model and under its reference model. All tensors are [B, T]. A model's preference for
    the chosen answer is the difference of log-likelihoods, in nats. The margin of a pair is the model's preference
    minus the reference's."""
    gained = by_document(reference.float() - losses.float(), documents)
    there = by_document((targets != IGNORED).float(), documents)[:, 0::2] > 0
    margin = gained[:, 0::2] - gained[:, 1::2]
    return torch.where(there, -F.logsigmoid(beta * margin), 0.0).sum()


def by_document(values: Tensor, documents: Tensor) -> Tensor:
    """The sums of values [B, T] over each document (see `numbered`), padded to an even number of documents: [B, T +
    1 or more]."""
    rows, tokens = values.shape
    most = tokens + 2 - tokens % 2
    flat = documents + most * torch.arange(rows, device=documents.device)[:, None]
    sums = values.new_zeros(rows * most).index_add(0, flat.flatten(), values.flatten())
    return sums.view(rows, most)
