"""Mesh of ranks: the part of the model, and of the batch, that a rank has.

Its dimensions, outermost first: pipeline stages, replicas, shards of a replica, and ranks that split the matrices of a
shard (tensor parallelism). Neighboring ranks, which are usually on one node, differ in the innermost dimension, because
its ranks communicate within every layer.

Ranks that split a sequence (context parallelism) compute with the same weights, like ranks with different samples. So
they are neighbors among replicas and shards, as if each had separate samples. This module does not depend on torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spec.parallel import Parallel

STAGES_EACH = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # stages of a pipeline per rank


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each dimension. The outermost one is `pipeline`."""

    replicas: int
    shards: int
    tensor: int
    pipeline: int = 1
    expert: int = 1  # of the ranks of a stage, which see other tokens: how many split a layer's experts
    context: int = 1  # of the replicas and shards, how many neighbors share one sample

    @classmethod
    def of(cls, parallel: Parallel, ranks: int) -> Mesh:
        """The mesh that `parallel` requests over `ranks` ranks, which it divides."""
        averaged = ranks // (parallel.tensor * parallel.pipeline)
        replicas = averaged if parallel.strategy == "ddp" else parallel.replicas
        return cls(
            replicas, averaged // replicas, parallel.tensor, parallel.pipeline, parallel.expert, parallel.context
        )

    @property
    def averaged(self) -> int:
        """The number of rank groups over which gradients are averaged. Each has separate rows, or a separate part of
        each row."""
        return self.replicas * self.shards

    @property
    def data(self) -> int:
        """The number of rank groups that see different samples. Each has an equal share of a global batch."""
        return self.averaged // self.context

    def data_rank(self, rank: int) -> int:
        """The index of a rank's data group."""
        return rank // (self.tensor * self.context) % self.data

    def context_rank(self, rank: int) -> int:
        """The index of a rank's part of every sequence."""
        return rank // self.tensor % self.context

    def context_groups(self) -> list[list[int]]:
        """The groups of ranks that share the same sequences, each in the order of their parts."""
        step = self.tensor * self.context
        starts = [first + place for first in range(0, self.size, step) for place in range(self.tensor)]
        return [list(range(start, start + step, self.tensor)) for start in starts]

    def ends(self) -> list[list[int]]:
        """The pairs of ranks at the same position in the first and in the last stage of a pipeline."""
        stage_size = self.averaged * self.tensor
        return [[rank, rank + (self.pipeline - 1) * stage_size] for rank in range(stage_size)]

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.pipeline * self.averaged * self.tensor

    def place(self, rank: int) -> int:
        """The position of a rank in the pipeline."""
        return rank // (self.tensor * self.averaged)

    def speaks(self, rank: int) -> bool:
        """Whether a rank contributes counts and losses to sums over all ranks. Of the ranks with the same part of
        the same rows, one does."""
        return rank % self.tensor == 0 and self.place(rank) == self.pipeline - 1  # the stage with the loss

    def counts(self, rank: int) -> bool:
        """Whether a rank contributes to sums for its rows. Of all ranks with the same rows, one does."""
        return self.speaks(rank) and self.context_rank(rank) == 0

    @property
    def of_experts(self) -> dict[str, int]:
        """The dimensions of the mesh for experts. Each rank along `expert` holds other experts. These ranks are
        neighbors within a replica, or within several replicas if one has too few ranks. All ranks have other tokens:
        the ranks of a tensor-parallel group have other parts of the sequences, so they are shards for experts."""
        replicas, ranks_inside = self.replicas, self.shards * self.tensor
        if ranks_inside % self.expert:
            replicas, ranks_inside = replicas * ranks_inside // self.expert, self.expert
        return {
            "pipeline": self.pipeline,
            "replicas": replicas,
            "shards": ranks_inside // self.expert,
            "expert": self.expert,
        }

    @property
    def spread(self) -> dict[str, int]:
        """The dimensions for torch's DeviceMesh: shards, and each other dimension with more than one rank."""
        sizes = {"pipeline": self.pipeline, "replicas": self.replicas, "shards": self.shards, "tensor": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
