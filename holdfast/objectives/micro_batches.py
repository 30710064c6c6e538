"""Micro-batches: the inputs, targets and documents of some rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.model.decoder import numbered
from holdfast.model.token_logprobs import IGNORED


class MicroBatch(NamedTuple):
    """Some rows of a batch, or a rank's part of each."""

    tokens: Tensor  # [B, T]
    targets: Tensor  # [B, T], IGNORED where a target has no loss
    documents: Tensor | None  # [B, T]: the number of each token's document in its row; None without masks


def micro_batches(rows: Tensor, size: int, end_of_text: int | None) -> Iterator[MicroBatch]:
    """`size` rows at a time, with documents if `end_of_text` is given. `rows` are [rows, context + 1] ids with their
    marks (see `dataset.vocabulary`). A document ends with the token `end_of_text`, or at a mark."""
    for part in rows.split(size):
        tokens, targets = part[:, :-1] & ID, part[:, 1:]
        targets = torch.where(targets & UNCOUNTED != 0, IGNORED, targets & ID)
        documents = None
        if end_of_text is not None:
            documents = numbered((part[:, :-1] & ENDS != 0) | (tokens == end_of_text))
        yield MicroBatch(tokens, targets, documents)
