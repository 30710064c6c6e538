"""Loss of a step: the sum over the counted tokens of the global batch, divided by their number.

Every engine counts alike over ranks and micro-batches. A mean of means would give a token more weight where fewer
tokens count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.dataset.vocabulary import ENDS, ID, UNCOUNTED
from holdfast.model.decoder import IGNORED, numbered


def micro_batches(rows: Tensor, size: int, end_of_text: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Inputs, targets and documents (with masks; else None) of `size` rows at a time. `rows` are [rows, context + 1]
    ids with their marks (see `dataset.marks`). A document ends with the token `end_of_text`, or at a mark."""
    for part in rows.split(size):
        tokens, targets = part[:, :-1] & ID, part[:, 1:]
        targets = torch.where(targets & UNCOUNTED != 0, IGNORED, targets & ID)
        documents = None
        if end_of_text is not None:
            documents = numbered((part[:, :-1] & ENDS != 0) | (tokens == end_of_text))
        yield tokens, targets, documents


def counted_tokens(rows: Tensor, speaks: bool = True) -> Tensor:
    """The number of counted targets in the global batch, of which `rows` are this rank's: an fp32 scalar on their
    device. Of ranks with the same rows, `speaks` is true on one. A collective call. The result is at least 1, so a
    batch without counted targets has the loss 0."""
    counted = (rows[:, 1:] & UNCOUNTED == 0).sum() * speaks
    if dist.is_initialized():
        dist.all_reduce(counted)
    return counted.clamp(min=1).to(torch.float32)
