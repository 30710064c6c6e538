"""Micro-batches: the inputs, targets and documents of some rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.model.attention.segments import Segments
from holdfast.model.decoder import numbered
from holdfast.model.token_logprobs import IGNORED


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
