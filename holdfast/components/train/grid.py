"""The grid of a global batch: fixed grains, one micro-batch each, dealt to however many ranks there are.

Under `determinism: elastic` a sum over the batch is one binary tree over grains. Grain i is leaf i; a node (level,
index) covers the grains [index << level, (index + 1) << level). The tree is the same at every number of ranks; only who
adds which part of it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.spec.errors import Problem, SpecError

Node = tuple[int, int]  # level and index


@dataclass(frozen=True)
class Grid:
    """`grains` of a global batch over `ranks`: each has a run of neighbouring grains, as equal as can be."""

    grains: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks > self.grains:
            problem = f"are too many for the {self.grains} micro-batches of a global batch"
            remedy = "use fewer, or a smaller training.micro_batch (which makes it another run)"
            raise SpecError([Problem("ranks", self.ranks, problem, remedy)])

    def share(self, rank: int) -> range:
        """The grains of a rank; never none."""
        return range(rank * self.grains // self.ranks, (rank + 1) * self.grains // self.ranks)

    @property
    def rounds(self) -> int:
        """How many grains the rank with most of them has."""
        return -(-self.grains // self.ranks)

    def in_turn(self, rank: int) -> range:
        """The grains of a rank where all ranks together compute neighbours at a time: one in each round, but for the
        last round, in which the last ranks may have none."""
        return range(rank, self.grains, self.ranks)

    def rows(self, rank: int, size: int, in_turn: bool) -> NDArray[np.int64]:
        """The rows of the global batch that are a rank's, with grains of `size` rows."""
        grains = self.in_turn(rank) if in_turn else self.share(rank)
        return (np.array(grains, np.int64)[:, None] * size + np.arange(size)).reshape(-1)

    def nodes(self, rank: int) -> list[Node]:
        """The largest nodes of the tree that lie within a rank's share, in their order."""
        found: list[Node] = []
        for grain in self.share(rank):
            _carry(found, (0, grain))
        return found


class PartialSums:
    """Adds up neighbouring grains as they come, in the order of the tree; keeps at most two sums for each level."""

    def __init__(self, first: int = 0) -> None:
        """`first` is the grain that comes first."""
        self._next = first
        self._nodes: list[Node] = []
        self._sums: list[list[Tensor]] = []

    def add(self, leaf: list[Tensor]) -> None:
        """The next grain's tensors, which are kept and written to."""
        self._sums.append(leaf)
        for _ in range(_carry(self._nodes, (0, self._next))):
            later = self._sums.pop()
            torch._foreach_add_(self._sums[-1], later)
        self._next += 1

    @property
    def nodes(self) -> list[Node]:
        """The largest nodes that what was added makes up, in their order."""
        return self._nodes

    @property
    def sums(self) -> list[list[Tensor]]:
        """The sums of `nodes`."""
        return self._sums

    def settle(self) -> None:
        """Copy what is kept, so that nothing larger is kept alive by it."""
        self._sums = [[tensor.clone() for tensor in sums] for sums in self._sums]

    def total(self, grid: Grid) -> list[Tensor]:
        """The sums over all grains, when all have been added."""
        return [root(grid, dict(zip(self._nodes, each, strict=True))) for each in zip(*self._sums, strict=True)]


def root(grid: Grid, sums: dict[Node, Tensor]) -> Tensor:
    """The sum over all grains from the sums of nodes that together cover each grain once. They are written to."""

    def total(level: int, index: int) -> Tensor:
        if (level, index) in sums:
            return sums[level, index]
        first = total(level - 1, 2 * index)
        if (2 * index + 1) << (level - 1) < grid.grains:
            first.add_(total(level - 1, 2 * index + 1))
        return first

    return total((grid.grains - 1).bit_length(), 0)


def all_nodes(grid: Grid) -> list[Sequence[Node]]:
    """The nodes of every rank."""
    return [grid.nodes(rank) for rank in range(grid.ranks)]


def _carry(nodes: list[Node], node: Node) -> int:
    """Append a node, and join what are now the two halves of a larger one, as a binary counter does; how often."""
    joined = 0
    while nodes and nodes[-1] == (node[0], node[1] - 1) and node[1] % 2:
        nodes.pop()
        node = (node[0] + 1, node[1] // 2)
        joined += 1
    nodes.append(node)
    return joined
