"""The loss of a step: the sum over the counted tokens of the global batch, divided by their number.

Every engine counts alike, over ranks and micro-batches: a mean of means would weigh a token more where fewer count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.components.model.decoder import IGNORED, document_ids


def micro_batches(rows: Tensor, size: int, end_of_text: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Inputs, targets and documents (with masks; else None) of `size` rows of [rows, context + 1] ids at a time."""
    for part in rows.split(size):
        tokens = part[:, :-1].clamp(min=0)  # what is not counted as a target is still read
        yield tokens, part[:, 1:], None if end_of_text is None else document_ids(tokens, end_of_text)


def counted_tokens(rows: Tensor) -> Tensor:
    """How many targets of the global batch count, of which `rows` are this rank's: an fp32 scalar on their device. A
    collective call. At least 1, so that a batch in which nothing counts has the loss 0."""
    counted = (rows[:, 1:] != IGNORED).sum()
    if dist.is_initialized():
        dist.all_reduce(counted)
    return counted.clamp(min=1).to(torch.float32)
