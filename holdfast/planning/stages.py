"""Which layers go to which stage of a pipeline: the split whose dearest stage costs least, whatever costs are in."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class StageCosts(BaseModel):
    """Seconds of a micro-batch, forward and backward, as they were measured on one device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    embedding: float
    layer: float
    head: float  # with the last norm and the loss

    def of_layers(self, layers: int) -> list[float]:
        """Of each layer of the model, the first one with the embedding and the last one with the head."""
        costs = [self.layer] * layers
        costs[0] += self.embedding
        costs[-1] += self.head
        return costs

    def of_stages(self, stages: Sequence[int]) -> list[float]:
        """Of each stage, of which `stages` says how many layers it has."""
        costs, done, found = self.of_layers(sum(stages)), 0, []
        for layers in stages:
            found.append(sum(costs[done : done + layers]))
            done += layers
        return found

    def balanced(self, layers: int, stages: int) -> list[int]:
        """How many layers each of so many stages has, so that the slowest is as fast as can be."""
        return [len(each) for each in split(self.of_layers(layers), stages)]


def split(costs: Sequence[float], stages: int) -> list[range]:
    """Neighbouring items dealt to stages, at least one to each, so that the dearest stage costs as little as can be.
    Exact, by dynamic programming over where the last stage begins; of equal splits the one whose later stages begin
    first."""
    most = sum(costs) + 1
    # best[n][k]: the dearest of n stages that have the first k items, and where the last of them begins
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
