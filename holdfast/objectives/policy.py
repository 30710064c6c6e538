"""Objective of generated answers: group-relative policy optimization (GRPO, Shao et al. 2024), as in `trl`.

A row has one answer. Its tokens carry the answer's advantage, and the log-probability that the model gave them before
the first update on them (`MicroBatch.scores`). The loss of a token is the negative minimum of ratio * advantage and
clipped ratio * advantage, plus the weighted divergence from a reference model (estimator k3). All divisors are counts
of the global batch, so no mean depends on ranks or micro-batches.
"""

from typing import ClassVar

import torch
from torch import Tensor

from holdfast.dataset.vocabulary import UNCOUNTED
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import MicroBatch, Need, ObjectiveInputs
from holdfast.spec.rollout import Grpo


class PolicyGradient:
    """See `Objective`. Without a reference model there is no divergence."""

    needs: ClassVar[frozenset[Need]] = frozenset({"documents"})
    terms: tuple[str, ...] = ("policy_loss", "clipped_share")
    weights: tuple[float, ...] = (1.0,)

    def __init__(self, settings: Grpo) -> None:
        """`settings` are those of `training.grpo`."""
        self._normalization, self._answer_tokens = settings.normalization, settings.answer_tokens
        self._low, self._high = 1 - settings.clip_low, 1 + settings.clip_high
        self._has_old = settings.updates > 1 or settings.lag > 0  # else the ratio of every token is 1

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective. An answer has at least one token that counts."""
        counted = word_of(rows)[:, 1:] & UNCOUNTED == 0
        tokens, answers = counted.sum(), counted.any(1).sum()
        divisor = {"dapo": tokens, "grpo": answers, "dr_grpo": answers * self._answer_tokens}[self._normalization]
        return self._divisors(divisor, tokens)

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective."""
        logprobs, counted = -given.losses.float(), batch.targets != IGNORED
        advantages, old = torch.zeros_like(logprobs), logprobs.detach()
        if batch.scores is not None:
            advantages = batch.scores[..., 0]
            old = batch.scores[..., 1] if self._has_old else old
        ratio = torch.where(counted, logprobs - old, 0.0).exp()
        clipped = ratio.clamp(self._low, self._high)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        outside = ((ratio < self._low) & (advantages < 0)) | ((ratio > self._high) & (advantages > 0))
        return torch.stack((self._total(losses, counted), *self._metrics(given, counted), (outside & counted).sum()))

    def _divisors(self, divisor: Tensor, tokens: Tensor) -> Tensor:
        return torch.stack((divisor, tokens))

    def _metrics(self, given: ObjectiveInputs, counted: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        """The sums between the loss and the clipped share."""
        return ()

    def _total(self, values: Tensor, counted: Tensor) -> Tensor:
        """The sum of `values` [B, T] over the counted targets. With `normalization: grpo` of each answer's mean."""
        sums = torch.where(counted, values, 0.0).sum(1)
        return (sums / counted.sum(1).clamp(min=1) if self._normalization == "grpo" else sums).sum()


class ReferencedPolicyGradient(PolicyGradient):
    """The same with the divergence from the reference model as a part of the loss. `kl` is its mean over the tokens."""

    needs: ClassVar[frozenset[Need]] = frozenset({"reference", "documents"})
    terms: tuple[str, ...] = ("policy_loss", "kl_loss", "kl", "clipped_share")

    def __init__(self, settings: Grpo) -> None:
        """`settings` are those of `training.grpo`."""
        super().__init__(settings)
        self.weights: tuple[float, ...] = (1.0, settings.kl_weight)

    def _divisors(self, divisor: Tensor, tokens: Tensor) -> Tensor:
        return torch.stack((divisor, divisor, tokens, tokens))

    def _metrics(self, given: ObjectiveInputs, counted: Tensor) -> tuple[Tensor, ...]:
        assert given.reference is not None
        distance = torch.where(counted, given.losses.float() - given.reference.float(), 0.0)
        divergence = distance.exp() - distance - 1
        return self._total(divergence, counted), torch.where(counted, divergence.detach(), 0.0).sum()


def policy_objective(settings: Grpo) -> PolicyGradient:
    """The objective of `training.grpo`."""
    return ReferencedPolicyGradient(settings) if settings.kl_weight else PolicyGradient(settings)


def word_of(rows: Tensor) -> Tensor:
    """The ids with their marks [rows, context + 1] of rows with or without scores (see `micro_batches`)."""
    return rows if rows.dim() == 2 else rows[..., 0]
