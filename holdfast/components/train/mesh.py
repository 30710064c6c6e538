"""The mesh of ranks: which part of the model, and of the batch, is a rank's.

Its dimensions, the outermost first: places in a pipeline, replicas of what is there, shards of a replica, and ranks
among which the matrices of a shard are cut (tensor parallelism). Neighbouring ranks, which are most often on one node,
differ in the innermost one, because its ranks talk within every layer. Ranks among which a sequence is cut (context
parallelism) have the same weights to compute with, as those have that see other samples: they are neighbours among the
replicas and shards, so that these dimensions are as if each of them had samples of its own. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spec.training import Parallel


@dataclass(frozen=True)
class Mesh:
    """How many ranks there are along each dimension (the outermost is `pipeline`)."""

    replicas: int
    shards: int
    tensor: int
    pipeline: int = 1
    expert: int = 1  # of the ranks of a stage, which see other tokens: those among which a layer's experts are dealt
    context: int = 1  # of the replicas and shards, how many neighbours see one sample together

    @classmethod
    def of(cls, parallel: Parallel, ranks: int) -> Mesh:
        """The mesh that `parallel` asks for over so many ranks, which it divides."""
        averaged = ranks // (parallel.tensor * parallel.pipeline)
        replicas = averaged if parallel.strategy == "ddp" else parallel.replicas
        return cls(
            replicas, averaged // replicas, parallel.tensor, parallel.pipeline, parallel.expert, parallel.context
        )

    @property
    def averaged(self) -> int:
        """Groups of ranks over which gradients are averaged: each has rows, or a part of each row, of its own."""
        return self.replicas * self.shards

    @property
    def data(self) -> int:
        """Groups of ranks that see different samples: each has the same share of a global batch."""
        return self.averaged // self.context

    def data_rank(self, rank: int) -> int:
        """Which of those groups a rank is in."""
        return rank // (self.tensor * self.context) % self.data

    def context_rank(self, rank: int) -> int:
        """Which part of every sequence is a rank's."""
        return rank // self.tensor % self.context

    def context_groups(self) -> list[list[int]]:
        """The groups of ranks that have the parts of the same sequences, each in the order of the parts."""
        step = self.tensor * self.context
        starts = [first + place for first in range(0, self.size, step) for place in range(self.tensor)]
        return [list(range(start, start + step, self.tensor)) for start in starts]

    def ends(self) -> list[list[int]]:
        """The pairs of ranks that have the same place in the first and in the last stage of a pipeline."""
        each = self.averaged * self.tensor
        return [[rank, rank + (self.pipeline - 1) * each] for rank in range(each)]

    @property
    def size(self) -> int:
        """All ranks."""
        return self.pipeline * self.averaged * self.tensor

    def place(self, rank: int) -> int:
        """Which place in the pipeline a rank has."""
        return rank // (self.tensor * self.averaged)

    def speaks(self, rank: int) -> bool:
        """Whether a rank is the one of those with its part of its rows whose counts and losses go into sums over all
        ranks."""
        return rank % self.tensor == 0 and self.place(rank) == self.pipeline - 1  # where the loss is

    def counts(self, rank: int) -> bool:
        """Whether a rank is the one of those with its rows that stands for all of them."""
        return self.speaks(rank) and self.context_rank(rank) == 0

    @property
    def of_experts(self) -> dict[str, int]:
        """The dimensions for what only experts have, of which each rank along `expert` holds others: neighbours within
        a replica, or where it has fewer ranks, in several. All ranks have other tokens, so those of a tensor-parallel
        group, which have other parts of the sequences, are shards to experts."""
        replicas, inside = self.replicas, self.shards * self.tensor
        if inside % self.expert:
            replicas, inside = replicas * inside // self.expert, self.expert
        return {"pipeline": self.pipeline, "replicas": replicas, "shards": inside // self.expert, "expert": self.expert}

    @property
    def spread(self) -> dict[str, int]:
        """The dimensions as torch is given them: shards, and those others along which there is more than one rank."""
        sizes = {"pipeline": self.pipeline, "replicas": self.replicas, "shards": self.shards, "tensor": self.tensor}
        return {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
