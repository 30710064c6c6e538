"""Interface between an engine and the objective of a step.

A step minimizes a weighted sum of terms. Each term is a sum over the global batch, divided by an integer: a count of
tokens, answers or pairs. The objective defines sums and counts. The engine divides the batch among ranks and
micro-batches, and adds both. So a result does not depend on the division, which a mean of means would.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.model.token_logprobs import Likeliest
from holdfast.objectives.micro_batches import MicroBatch

# What an objective uses in addition to the losses of the trained model: the losses of a frozen reference model, the
# divergence from it on answers to other prompts, the likeliest tokens of a frozen teacher, whole logits instead of
# losses, or all positions of a row, because it adds up documents.
Need = Literal["reference", "divergence", "teacher", "logits", "documents"]


class ObjectiveInputs(NamedTuple):
    """What an engine computes for an objective from a micro-batch. Only `losses` and `logits` have a
    gradient."""

    losses: Tensor  # [B, T], fp32: the cross-entropy of each target; with a teacher [B, T, 1 + K], also of its tokens
    reference: Tensor | None = None  # [B, T]: the same under the reference model
    divergence: Tensor | None = None  # of the global batch, in nats, at least 0
    teacher: Likeliest | None = None
    logits: Tensor | None = None  # [B, T, vocabulary], if the objective needs them; `losses` is then empty


class Objective(Protocol):
    """What a step minimizes."""

    needs: ClassVar[frozenset[Need]]
    terms: tuple[str, ...]  # names of the sums, for the history
    weights: tuple[float, ...]  # of the first terms, which the loss consists of; the remaining ones are metrics

    def counts(self, rows: Tensor) -> Tensor:
        """The divisor of each term in `rows`: int64 [terms] on their device. `rows` are [rows, context + 1] ids with
        their marks (see `dataset.vocabulary`)."""

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """The sum of each term of a micro-batch: fp32 [terms]. Metrics have no gradient."""


def count_terms(objective: Objective, rows: Tensor, contributes: bool = True) -> Tensor:
    """The divisors of the global batch, of which `rows` are this rank's: fp32 [terms] on their device. Of ranks with
    the same rows, `contributes` is true on one. A collective call. Divisors are at least 1, so a batch without terms
    has the loss 0."""
    counted = objective.counts(rows) * contributes
    if dist.is_initialized():
        dist.all_reduce(counted)
    return counted.clamp(min=1).float()


def metrics_of(objective: Objective, values: Tensor) -> dict[str, Tensor]:
    """The values of all terms by name. An objective with a single term has none, because its loss says the same."""
    return dict(zip(objective.terms, values.unbind(), strict=True)) if len(objective.terms) > 1 else {}


def weighted(objective: Objective, values: Tensor) -> Tensor:
    """The loss from the values of all terms: a scalar."""
    weights = weights_of(objective, values)
    return (values[: len(weights)] * weights).sum()


def weights_of(objective: Objective, like: Tensor) -> Tensor:
    """The weights of an objective's terms, in the type and on the device of `like`."""
    return _on_device(tuple(objective.weights), like.dtype, like.device)


@cache
def _on_device(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers, copied once: every copy from the host waits until the device has done all that it was given."""
    return torch.tensor(numbers, dtype=dtype, device=device)
