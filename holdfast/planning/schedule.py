"""Pipeline schedules: waiting time of stages, their micro-batches in flight, and a drawing of the timeline.

GPipe (Huang 2019), 1F1B (PipeDream-Flush, Narayanan 2021), interleaved 1F1B (Megatron-LM, SC'21) and the zero-bubble
schedule ZB-H1 (Qi 2024), which computes weight gradients where other schedules wait.
"""

from collections.abc import Sequence

from pydantic import BaseModel

from holdfast.planning.layout import Layout

FINEST = 5  # columns of the most expensive forward pass, if stages differ


def bubble(layout: Layout, micro_batches: int) -> float:
    """The waiting time of a stage per step, as a share of its computing time."""
    waits = (layout.pipeline - 1) / micro_batches
    match layout.schedule:
        case "interleaved":
            return waits / layout.chunks
        case "zero_bubble":
            return (
                waits / 3
            )  # forward, backward of inputs and of weights take equally long; only one of three is waited for
        case _:
            return waits


def in_flight(layout: Layout, micro_batches: int, stage: int = 0) -> float:
    """Micro-batches whose activations of a whole stage are held simultaneously."""
    stages = layout.pipeline
    match layout.schedule:
        case "gpipe":
            return micro_batches
        case "interleaved":
            warm_up = stages - stage + (stages - 1) / layout.chunks
            return min(micro_batches, warm_up)
        case _:
            return min(micro_batches, stages - stage)


def timeline(layout: Layout, micro_batches: int, width: int = 120, costs: Sequence[float] | None = None) -> str:
    """Draw a line per stage: the micro-batch that it computes in each unit of time.

    Digits (the last one of the number) are forward passes, letters with two columns are backward passes, and dots are
    waiting. The interleaved schedule shows the chunks of a stage one after another. `costs` has each rank's cost of
    layers, in any unit. The most expensive takes FINEST columns for a forward pass. The waiting share is that of the
    drawing.
    """
    stages = layout.pipeline
    columns = [1] * stages if costs is None else [max(1, round(FINEST * cost / max(costs))) for cost in costs]
    rows = _rows(layout, micro_batches, stages, columns)
    end = max(map(len, rows))
    lines = [f"stage {stage:>3} |{''.join(row).ljust(end, '.')[:width]}" for stage, row in enumerate(rows)]
    waited = bubble(layout, micro_batches)
    if costs is not None:
        busy = sum(column != "." for row in rows for column in row)
        waited = stages * end / busy - 1
    return "\n".join([*lines, f"{'':>9} {waited:.1%} of the computing time is waited for"])


def _order(layout: Layout, micro_batches: int, stages: int, stage: int) -> list[tuple[str, int]]:
    """The operations of a stage in order: (forward, backward or weights; number of the micro-batch)."""
    first = micro_batches if layout.schedule == "gpipe" else min(micro_batches, stages - stage)
    order = [("f", number) for number in range(first)]
    parts = "bw" if layout.schedule == "zero_bubble" else "b"
    for number in range(micro_batches):
        order.append(("b", number))
        if layout.schedule == "zero_bubble" and number >= stage:  # earlier weight gradients fill the bubble
            order.append(("w", number - stage))
        if number + first < micro_batches:
            order.append(("f", number + first))
    if "w" in parts:
        order += [("w", number) for number in range(max(0, micro_batches - stage), micro_batches)]
    return order


def _rows(layout: Layout, micro_batches: int, stages: int, columns: Sequence[int]) -> list[list[str]]:
    """The columns of each stage. A forward pass takes `columns`, and every operation starts as soon as its inputs
    exist.
    """
    orders = [_order(layout, micro_batches, stages, stage) for stage in range(stages)]
    long = 1 if layout.schedule == "zero_bubble" else 2
    done: dict[tuple[str, int, int], int] = {}  # (operation, stage, number) -> end
    rows: list[list[str]] = [[] for _ in range(stages)]
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, number = order[0]
                dependency = {
                    "f": ("f", stage - 1, number) if stage else None,
                    "b": ("b", stage + 1, number) if stage + 1 < stages else ("f", stage, number),
                    "w": ("b", stage, number),
                }[kind]
                if dependency is not None and dependency not in done:
                    break
                row = rows[stage]
                row.extend("." * (done.get(dependency, 0) - len(row)) if dependency is not None else "")
                letter = {"f": str(number % 10), "b": chr(ord("a") + number % 26), "w": chr(ord("A") + number % 26)}
                row.extend(letter[kind] * columns[stage] * (1 if kind != "b" else long))
                done[kind, stage, number] = len(row)
                order.pop(0)
    return rows


# Assignment of layers to pipeline stages: the split that minimizes the most expensive stage, in any unit of cost.


class StageCosts(BaseModel, extra="forbid", frozen=True):
    """Seconds per micro-batch, forward and backward, measured on one device."""

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
        costs, done, stage_costs = self.of_layers(sum(stages)), 0, []
        for layers in stages:
            stage_costs.append(sum(costs[done : done + layers]))
            done += layers
        return stage_costs

    def balanced(self, layers: int, stages: int) -> list[int]:
        """The number of layers of each stage that minimizes the slowest stage."""
        return [len(stage_layers) for stage_layers in split(self.of_layers(layers), stages)]


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
    parts, end = [], len(costs)
    for number in range(stages, 0, -1):
        first = best[number][end][1]
        parts.append(range(first, end))
        end = first
    return parts[::-1]
