"""Assignment of layers to pipeline stages: the split that minimizes the most expensive stage, in any unit of cost."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class StageCosts(BaseModel):
    """Seconds per micro-batch, forward and backward, measured on one device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    embedding: float
    layer: float
    head: float  # including the last norm and the loss

    def of_layers(self, layers: int) -> list[float]:
        """The cost of each layer of the model; the first one includes the embedding and the last one the head."""
        costs = [self.layer] * layers
        costs[0] += self.embedding
        costs[-1] += self.head
        return costs

    def of_stages(self, stages: Sequence[int]) -> list[float]:
        """The cost of each stage; `stages` has their numbers of layers."""
        costs, done, found = self.of_layers(sum(stages)), 0, []
        for layers in stages:
            found.append(sum(costs[done : done + layers]))
            done += layers
        return found

    def balanced(self, layers: int, stages: int) -> list[int]:
        """The number of layers of each stage that minimizes the slowest stage."""
        return [len(each) for each in split(self.of_layers(layers), stages)]


def split(costs: Sequence[float], stages: int) -> list[range]:
    """Split neighboring items into stages of at least one, so that the most expensive stage costs least.

    Exact, by dynamic programming over the start of the last stage. Of equal splits, the one with the earliest starts of
    later stages wins.
    """
    most = sum(costs) + 1
    # best[n][k]: the cost of the most expensive of n stages with the first k items, and the start of the last stage
    best: list[list[tuple[float, int]]] = [[(0, 0)] + [(most, 0)] * len(costs)]
    for number in range(1, stages + 1):
        row: list[tuple[float, int]] = [(most, 0)] * (len(costs) + 1)
        for end in range(number, len(costs) + 1):
            row[end] = min((max(best[-1][first][0], sum(costs[first:end])), first) for first in range(number - 1, end))
        best.append(row)
    found, end = [], len(costs)
    for number in range(stages, 0, -1):
        first = best[number][end][1]
        found.append(range(first, end))
        end = first
    return found[::-1]
