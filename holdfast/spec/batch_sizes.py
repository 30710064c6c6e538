"""Samples in the batch of each step, and samples before it, as pure functions of the step.

With `training.batch_ramp` the batch grows in equal increments over the first steps. Positions in the training
sequence are numbered continuously, so an epoch still uses each sample exactly once. Seeking is a search in the table
of increments.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

from holdfast.spec.training import Training


@dataclass(frozen=True)
class BatchSizes:
    """Batches of `final` samples, or batches that grow from `start` by `increment` at equally spaced steps. The last of
    these steps is `steps` (from 0)."""

    final: int
    start: int | None = None
    increment: int = 1
    steps: int = 1
    _table: tuple[list[int], list[int], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        levels = 0 if self.start is None else (self.final - self.start) // self.increment
        sizes = [self.final - self.increment * (levels - level) for level in range(levels + 1)]
        begins = [-(-level * self.steps // max(1, levels)) for level in range(levels + 1)]
        spans = [(after - before) * size for before, after, size in zip(begins, begins[1:], sizes, strict=False)]
        object.__setattr__(self, "_table", (begins, sizes, list(accumulate(spans, initial=0))))

    @classmethod
    def of(cls, training: Training) -> BatchSizes:
        """The batch sizes of a spec."""
        ramp = training.batch_ramp
        if ramp.start is None or ramp.increment is None:
            return cls(training.global_batch)
        return cls(training.global_batch, ramp.start, ramp.increment, ramp.steps)

    def size(self, step: int) -> int:
        """Samples of the batch of `step`, which counts from 0."""
        begins, sizes, _ = self._table
        return sizes[bisect_right(begins, step) - 1]

    def before(self, step: int) -> int:
        """Samples of all batches before that of `step`: the position of its first sample."""
        begins, sizes, firsts = self._table
        level = bisect_right(begins, step) - 1
        return firsts[level] + (step - begins[level]) * sizes[level]
