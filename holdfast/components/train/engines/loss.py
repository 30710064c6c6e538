"""The loss of a step: the sum over the counted tokens of the global batch, divided by their number.

Every engine counts alike, over ranks and micro-batches: a mean of means would weigh a token more where fewer count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.dataset.marks import ENDS, ID, UNCOUNTED
from holdfast.model.decoder import IGNORED, numbered


def micro_batches(rows: Tensor, size: int, end_of_text: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Inputs, targets and documents (with masks; else None) of `size` rows of [rows, context + 1] ids at a time, with
    their marks (see `dataset.marks`). A document ends with the token `end_of_text`, or where it is marked."""
    for part in rows.split(size):
        tokens, targets = part[:, :-1] & ID, part[:, 1:]
        targets = torch.where(targets & UNCOUNTED != 0, IGNORED, targets & ID)
        documents = None
        if end_of_text is not None:
            documents = numbered((part[:, :-1] & ENDS != 0) | (tokens == end_of_text))
        yield tokens, targets, documents


def counted_tokens(rows: Tensor, speaks: bool = True) -> Tensor:
    """How many targets of the global batch count, of which `rows` are this rank's: an fp32 scalar on their device. Of
    ranks with the same rows one `speaks`. A collective call. At least 1, so that a batch in which nothing counts has
    the loss 0."""
    counted = (rows[:, 1:] & UNCOUNTED == 0).sum() * speaks
    if dist.is_initialized():
        dist.all_reduce(counted)
    return counted.clamp(min=1).to(torch.float32)
