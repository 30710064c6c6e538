"""Interface between an engine and the objective of a step.

A step minimizes a weighted sum of terms. Each term is a sum over the global batch, divided by an integer: a count of
tokens, answers or pairs. The objective defines sums and counts. The engine divides the batch among ranks and
micro-batches, and adds both. So a result does not depend on the division, which a mean of means would.

An engine passes micro-batches to the objective: inputs, targets and documents of some rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import numbered
from holdfast.model.token_logprobs import IGNORED, Likeliest

# What an objective uses in addition to the losses of the trained model: the losses of a frozen reference model, the
# divergence from it on answers to other prompts, the likeliest tokens of a frozen teacher, whole logits instead of
# losses, or all positions of a row, because it adds up documents.
Need = Literal["reference", "divergence", "teacher", "logits", "documents"]


class MicroBatch(NamedTuple):
    """Some rows of a batch, or a rank's part of each."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T], IGNORED where a target has no loss
    documents: Tensor | None  # [B, T]: the number of each token's document in its row; None without masks
    segments: Segments  # the documents of whole rows, for attention; each row is one without masks
    marks: Tensor  # [B, T]: the targets with their marks
    scores: Tensor | None = None  # [B, T, 2], fp32: advantage and earlier log-probability of targets; None without

    def some(self, rows: slice) -> MicroBatch:
        """Some of the rows. The segments remain those of all."""
        documents = None if self.documents is None else self.documents[rows]
        scores = None if self.scores is None else self.scores[rows]
        return MicroBatch(self.tokens[rows], self.targets[rows], documents, self.segments, self.marks[rows], scores)


def micro_batches(rows: Tensor, size: int, end_of_text: int | None, device: torch.device) -> Iterator[MicroBatch]:
    """`size` rows at a time on a device, with documents if `end_of_text` is given. `rows` are [rows, context + 1] ids
    on the CPU with their marks (see `dataset.vocabulary`). A document ends with the token `end_of_text`, or at a
    mark. Rows [rows, context + 1, 2] have the scores of each token in their second half (see `with_scores`)."""
    for words in rows.split(size):
        part = words if words.dim() == 2 else words[..., 0].contiguous()
        documents, segments = None, Segments.of_rows(len(part), part.shape[1] - 1)
        if end_of_text is not None:
            numbers = _documents(part, end_of_text)
            segments, documents = Segments.of_documents(numbers), numbers.to(device, non_blocking=True)
        here = part.to(device, non_blocking=True)
        tokens, marks = here[:, :-1] & ID, here[:, 1:]
        targets = torch.where(marks & UNCOUNTED != 0, IGNORED, marks & ID)
        scores = None
        if words.dim() == 3:
            pairs = words[:, 1:, 1:].contiguous().view(torch.float32)
            scores = pairs.to(device, non_blocking=True)
        yield MicroBatch(tokens, targets, documents, segments, marks, scores)


def with_scores(words: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Rows [rows, context + 1, 2] of ids with marks [rows, context + 1], and the two scores of each token, fp32."""
    pairs = torch.stack((advantages, logprobs), -1).contiguous().view(torch.int64)
    return torch.cat((words[..., None], pairs), -1)


def _documents(rows: Tensor, end_of_text: int) -> Tensor:
    inputs = rows[:, :-1]
    return numbered((inputs & ENDS != 0) | (inputs & ID == end_of_text))


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
