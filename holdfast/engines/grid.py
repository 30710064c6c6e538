"""Grid of a global batch: fixed grains of one micro-batch each, divided among any number of ranks.

Under `determinism: elastic` a sum over the batch is one binary tree over grains. Grain i is leaf i. A node (level,
index) covers the grains [index << level, (index + 1) << level). The tree is the same for every number of ranks. Only
the rank that adds each part changes.
"""

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
    """`grains` of a global batch over `ranks`. Each rank has a run of neighboring grains. The runs are as equal as
    possible, or as proportional as possible to `speeds`, one for each rank. Raises SpecError for more ranks than
    grains."""

    grains: int
    ranks: int
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks > self.grains:
            problem = f"are too many for the {self.grains} micro-batches of a global batch"
            remedy = "use fewer, or a smaller training.micro_batch (which makes it another run)"
            raise SpecError([Problem("ranks", self.ranks, problem, remedy)])

    def share(self, rank: int) -> range:
        """The grains of a rank, at least one."""
        if self.speeds:
            return range(self._first(rank), self._first(rank + 1))
        return range(rank * self.grains // self.ranks, (rank + 1) * self.grains // self.ranks)

    def _first(self, rank: int) -> int:
        """The first grain of a rank by its speed. Each rank before it has at least one, and each rank from it on."""
        first = 0
        for before in range(1, rank + 1):
            fair = round(self.grains * sum(self.speeds[:before]) / sum(self.speeds))
            first = min(max(fair, first + 1), self.grains - (self.ranks - before))
        return first

    @property
    def rounds(self) -> int:
        """The largest number of grains on a rank that has equal shares."""
        return -(-self.grains // self.ranks)

    def round_robin(self, rank: int) -> range:
        """The grains of a rank if all ranks together compute neighboring grains in each round. A rank has one grain
        per round. In the last round the last ranks may have none."""
        return range(rank, self.grains, self.ranks)

    def rows(self, rank: int, size: int, round_robin: bool) -> NDArray[np.int64]:
        """This rank's rows of the global batch, with grains of `size` rows."""
        grains = self.round_robin(rank) if round_robin else self.share(rank)
        return (np.array(grains, np.int64)[:, None] * size + np.arange(size)).reshape(-1)

    def nodes(self, rank: int) -> list[Node]:
        """The largest tree nodes within a rank's share, in order."""
        nodes: list[Node] = []
        for grain in self.share(rank):
            _carry(nodes, (0, grain))
        return nodes


class PartialSums:
    """Sums of neighboring grains in tree order, added as they arrive. Keeps at most two sums per level."""

    def __init__(self, first: int = 0) -> None:
        """`first` is the index of the first grain."""
        self._next = first
        self._nodes: list[Node] = []
        self._sums: list[list[Tensor]] = []

    def add(self, leaf: list[Tensor]) -> None:
        """Add the next grain's tensors. They are kept and changed in place."""
        self._sums.append(leaf)
        for _ in range(_carry(self._nodes, (0, self._next))):
            later = self._sums.pop()
            torch._foreach_add_(self._sums[-1], later)
        self._next += 1

    @property
    def nodes(self) -> list[Node]:
        """The largest nodes that the added grains make up, in order."""
        return self._nodes

    @property
    def sums(self) -> list[list[Tensor]]:
        """The sums of `nodes`."""
        return self._sums

    def settle(self) -> None:
        """Copy the kept tensors, so that they keep no larger storage alive."""
        self._sums = [[tensor.clone() for tensor in sums] for sums in self._sums]

    def total(self, grid: Grid) -> list[Tensor]:
        """The sums over all grains. Call it when all have been added."""
        return [root(grid, dict(zip(self._nodes, sums, strict=True))) for sums in zip(*self._sums, strict=True)]


def root(grid: Grid, sums: dict[Node, Tensor]) -> Tensor:
    """The sum over all grains, from the sums of nodes that cover each grain once. Changes the tensors in place."""

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
    """Append a node, and join the two halves of larger nodes as a binary counter carries. Returns the number of
    joins."""
    joined = 0
    while nodes and nodes[-1] == (node[0], node[1] - 1) and node[1] % 2:
        nodes.pop()
        node = (node[0] + 1, node[1] // 2)
        joined += 1
    nodes.append(node)
    return joined
