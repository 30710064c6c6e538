"""Pipeline schedules: waiting time of stages, their micro-batches in flight, and a drawing of the timeline.

GPipe (Huang 2019), 1F1B (PipeDream-Flush, Narayanan 2021), interleaved 1F1B (Megatron-LM, SC'21) and the zero-bubble
schedule ZB-H1 (Qi 2024), which computes weight gradients where other schedules wait.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    layers, in any unit: the most expensive takes FINEST columns for a forward pass, and the waiting share is that of
    the drawing.
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
                what, number = order[0]
                need = {
                    "f": ("f", stage - 1, number) if stage else None,
                    "b": ("b", stage + 1, number) if stage + 1 < stages else ("f", stage, number),
                    "w": ("b", stage, number),
                }[what]
                if need is not None and need not in done:
                    break
                row = rows[stage]
                row.extend("." * (done.get(need, 0) - len(row)) if need is not None else "")
                letter = {"f": str(number % 10), "b": chr(ord("a") + number % 26), "w": chr(ord("A") + number % 26)}
                row.extend(letter[what] * columns[stage] * (1 if what != "b" else long))
                done[what, stage, number] = len(row)
                order.pop(0)
    return rows
