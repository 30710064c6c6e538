"""Objectives of preference pairs: DPO, ORPO and the ranking loss of reward models.

In a row of a preference dataset, every even document is a chosen answer. The next document is the rejected answer to
the same prompt. Formulas are those of `trl`.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, UNCOUNTED
from holdfast.model.decoder import numbered
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import MicroBatch, Need, ObjectiveInputs

CERTAIN = -(2.0**-20)  # the highest mean log-probability of an answer's tokens whose odds are computed


class DirectPreference:
    """Direct preference optimization (Rafailov et al. 2023) in its sigmoid form. The loss of a pair is -log sigmoid(
    beta * margin). The margin is how much more the model prefers the chosen answer than the reference does, in nats.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"reference", "documents"})
    terms: tuple[str, ...] = ("pair_loss", "reward_accuracy", "reward_margin")
    weights: tuple[float, ...] = (1.0,)

    def __init__(self, beta: float) -> None:
        """`beta` is the weight of a margin."""
        self._beta = beta

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        return counted_pairs(rows).expand(3)

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective. The reward of an answer is beta times the difference of log-likelihoods."""
        assert given.reference is not None
        pairs = Pairs.of(given.reference.float() - given.losses.float(), batch)
        margin = self._beta * (pairs.chosen - pairs.rejected)
        return torch.stack((pairs.total(-F.logsigmoid(margin)), *_metrics(pairs, margin)))


class OddsRatio:
    """Odds-ratio preference optimization (Hong et al. 2024), which needs no reference model. The loss is the mean
    cross-entropy of the chosen answers' tokens, plus beta times the mean over the pairs of -log sigmoid of the log odds
    ratio. The probability of an answer is the geometric mean of its tokens'."""

    needs: ClassVar[frozenset[Need]] = frozenset({"documents"})
    terms: tuple[str, ...] = ("cross_entropy", "odds_ratio_loss", "reward_accuracy", "reward_margin")

    def __init__(self, beta: float) -> None:
        """`beta` is the weight of the odds ratio."""
        self._beta = beta
        self.weights: tuple[float, ...] = (1.0, beta)

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        documents = numbered(rows[:, :-1] & ENDS != 0)
        chosen = (rows[:, 1:] & UNCOUNTED == 0) & (documents % 2 == 0)
        return torch.stack((chosen.sum(), *counted_pairs(rows).expand(3)))

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective. The reward of an answer is beta times the mean log-probability of its tokens."""
        pairs = Pairs.of(-given.losses.float(), batch, mean=True)
        odds = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
        margin = self._beta * (pairs.chosen - pairs.rejected)
        assert batch.documents is not None
        of_chosen = torch.where(batch.documents % 2 == 0, given.losses.float(), 0.0).sum()
        return torch.stack((of_chosen, pairs.total(-F.logsigmoid(odds)), *_metrics(pairs, margin)))


class RewardModel:
    """Pairwise ranking loss of a model with a scalar head (Ouyang et al. 2022): -log sigmoid of the difference of the
    rewards. The reward of an answer is the number at its last token."""

    needs: ClassVar[frozenset[Need]] = frozenset({"documents"})
    terms: tuple[str, ...] = ("pair_loss", "reward_accuracy", "reward_margin")
    weights: tuple[float, ...] = (1.0,)

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        return counted_pairs(rows).expand(3)

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective. The model gives a number for each token, in place of its loss."""
        is_last = torch.zeros_like(batch.marks, dtype=torch.bool)
        is_last[:, 1:] = batch.marks[:, :-1] & ENDS != 0
        pairs = Pairs.of(torch.where(is_last, given.losses.float(), 0.0), batch)
        margin = pairs.chosen - pairs.rejected
        return torch.stack((pairs.total(-F.logsigmoid(margin)), *_metrics(pairs, margin)))


class Pairs(NamedTuple):
    """A value of each answer, [B, pairs]. Where there is no pair, it is that of a harmless answer."""

    chosen: Tensor
    rejected: Tensor
    exists: Tensor  # bool

    @classmethod
    def of(cls, values: Tensor, batch: MicroBatch, mean: bool = False) -> Pairs:
        """The sums of `values` [B, T] over each answer, or their means over its counted tokens."""
        assert batch.documents is not None, "the spec requires data.document_masks for pairs"
        sums = by_document(values, batch.documents)
        counts = by_document((batch.targets != IGNORED).float(), batch.documents)
        if mean:
            sums = torch.where(counts > 0, sums, -1.0) / counts.clamp(min=1)
        return cls(sums[:, 0::2], sums[:, 1::2], counts[:, 0::2] > 0)

    def total(self, values: Tensor) -> Tensor:
        """The sum of `values` [B, pairs] over the pairs."""
        return torch.where(self.exists, values, 0.0).sum()


def _metrics(pairs: Pairs, margin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs whose chosen answer has the larger reward, and the sum of the margins of rewards."""
    margin = margin.detach()
    return pairs.total((margin > 0).float()), pairs.total(margin)


def counted_pairs(rows: Tensor) -> Tensor:
    """The number of pairs in rows."""
    documents = numbered(rows[:, :-1] & ENDS != 0)
    counts = by_document((rows[:, 1:] & UNCOUNTED == 0).float(), documents)
    return (counts[:, 0::2] > 0).sum()


def by_document(values: Tensor, documents: Tensor) -> Tensor:
    """The sums of values [B, T] over each document (see `numbered`), padded to an even number of documents: [B, T +
    1 or more]."""
    rows, tokens = values.shape
    most = tokens + 2 - tokens % 2
    flat = documents + most * torch.arange(rows, device=documents.device)[:, None]
    sums = values.new_zeros(rows * most).index_add(0, flat.flatten(), values.flatten())
    return sums.view(rows, most)


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 - p)), without cancellation. Of a certain answer they are finite."""
    logprobs = logprobs.clamp(max=CERTAIN)
    near = logprobs > -math.log(2)
    above = (-torch.where(near, logprobs, -1.0).expm1()).log()
    below = (-torch.where(near, -1.0, logprobs).exp()).log1p()
    return logprobs - torch.where(near, above, below)
