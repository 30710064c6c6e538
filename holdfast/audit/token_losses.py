"""Token losses of one step of a replay, handed from its ranks to the job.

The objective of the replay keeps the losses that it adds up, so they are those of the step, to the bit. Each rank with
losses writes a file. Together, the files have every target of the global batch.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.collectives import Gang
from holdfast.dataset.vocabulary import UNCOUNTED
from holdfast.engines.assignment import Assignment
from holdfast.engines.mesh import Mesh
from holdfast.engines.torch.context import positions_of
from holdfast.objectives.interface import MicroBatch, ObjectiveInputs
from holdfast.objectives.next_token import NextToken
from holdfast.rank.setup import rows_of_rank


class TokenLosses(NextToken):
    """Next-token loss that keeps the losses of the tokens of the newest step on this rank."""

    def __init__(self) -> None:
        self._rows = torch.empty(0, 1, dtype=torch.int64)
        self._parts: list[tuple[Tensor, Tensor]] = []  # the losses and the marks of each micro-batch

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective. An engine calls it once, at the beginning of a step."""
        self._rows, self._parts = rows, []
        return super().counts(rows)

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective."""
        self._parts.append((given.losses.detach().clone(), batch.marks))
        return super().sums(given, batch)

    def write(self, folder: Path, spec: Assignment, gang: Gang, size: int) -> None:
        """Write the losses of the step into a file: of this rank's rows of the batch of `size` rows, and of the
        positions that it has of each. A rank without losses, such as an earlier stage of a pipeline, writes nothing."""
        if not self._parts:
            return
        rows = rows_of_rank(spec, gang)(size)
        numbers = np.arange(size)[rows]
        positions = positions_of(Mesh.of(spec.parallel, gang.size), gang.rank, spec.model.context)
        losses, marks = (torch.cat(part)[: len(numbers)] for part in zip(*self._parts, strict=True))  # no spare grains
        expected = self._rows[:, 1:][:, positions.to(self._rows.device)]
        assert torch.equal(marks, expected), "the micro-batches of a rank are its rows, in their order"
        np.savez(
            folder / f"{gang.rank}.npz",
            rows=numbers,
            positions=positions.numpy(),
            losses=losses.float().cpu().numpy(),
            counted=(marks & UNCOUNTED == 0).cpu().numpy(),
        )


class BatchLosses(NamedTuple):
    """The losses of the targets of a global batch. Target t of a row is its token t + 1."""

    losses: NDArray[np.float32]  # [rows, context], in nats; 0 where a target does not count
    counted: NDArray[np.bool_]  # [rows, context]


def read_losses(folder: Path, rows: int, context: int) -> BatchLosses:
    """What the ranks wrote into `folder`. Ranks that share rows wrote the same."""
    losses, counted = np.zeros((rows, context), np.float32), np.zeros((rows, context), np.bool_)
    seen = np.zeros((rows, context), np.bool_)
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as part:
            at = np.ix_(part["rows"], part["positions"])
            losses[at], counted[at], seen[at] = part["losses"], part["counted"], True
    assert seen.all(), "the ranks of a replay have all rows of a batch"
    return BatchLosses(losses, counted)
