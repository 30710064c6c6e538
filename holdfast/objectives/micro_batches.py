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

    def some(self, rows: slice) -> MicroBatch:
        """Some of the rows. The segments remain those of all."""
        documents = None if self.documents is None else self.documents[rows]
        return MicroBatch(self.tokens[rows], self.targets[rows], documents, self.segments, self.marks[rows])


def micro_batches(rows: Tensor, size: int, end_of_text: int | None, device: torch.device) -> Iterator[MicroBatch]:
    """`size` rows at a time on a device, with documents if `end_of_text` is given. `rows` are [rows, context + 1] ids
    on the CPU with their marks (see `dataset.vocabulary`). A document ends with the token `end_of_text`, or at a
    mark."""
    for part in rows.split(size):
        documents, segments = None, Segments.of_rows(len(part), part.shape[1] - 1)
        if end_of_text is not None:
            numbers = _documents(part, end_of_text)
            segments, documents = Segments.of_documents(numbers), numbers.to(device, non_blocking=True)
        here = part.to(device, non_blocking=True)
        tokens, marks = here[:, :-1] & ID, here[:, 1:]
        targets = torch.where(marks & UNCOUNTED != 0, IGNORED, marks & ID)
        yield MicroBatch(tokens, targets, documents, segments, marks)


def _documents(rows: Tensor, end_of_text: int) -> Tensor:
    inputs = rows[:, :-1]
    return numbered((inputs & ENDS != 0) | (inputs & ID == end_of_text))
