"""F6: the cost of equal bits: a step of two ranks under `determinism: off`, `exact` and `elastic`, side by side.

`python -m benchmarks.determinism [--ranks N] [--rounds N] [--steps N]` starts the ranks once for each level, with the
model of examples/quickstart.yaml and the allocator's settings of a run. The levels alternate: in every round each runs
`--steps` steps while the remaining ones wait. For each layout it prints the median time of a step, and the median of
its ratios to `exact` in the same round. The bar for elastic is 1.10. It prints the same for the processor time of all
ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from holdfast.launch.accelerators import ACCELERATORS

LEVELS = ("off", "exact", "elastic")
SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
WARM_UP = 3


def rank(pipe: Connection, level: str, strategy: str, number: int, ranks: int, meeting: str) -> None:
    """One rank. It receives numbers of steps, runs them, and replies with the seconds they took."""
    import torch
    import torch.distributed as dist

    from holdfast.engines.assignment import Assignment
    from holdfast.engines.interface import build_engine
    from holdfast.engines.weights import SeededState
    from holdfast.rank.randomness import make_deterministic
    from holdfast.spec import load_spec

    spec = load_spec(
        SPEC,
        [
            f"training.determinism={level}",
            f"parallel.strategy={strategy}",
            f"parallel.processes={ranks}",
        ],
    )
    make_deterministic(level, 1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=ranks)
    vocabulary = spec.data.tokenizer.vocabulary
    assignment = Assignment.of(spec, "run", "0" * 16)
    engine = build_engine(assignment, vocabulary, 0)
    SeededState(spec.model, 0).fill(engine.boxes())
    engine.restored(0)
    noise = torch.Generator().manual_seed(number)
    rows = torch.randint(1, vocabulary, (spec.training.global_batch // ranks, spec.model.context + 1), generator=noise)
    while (steps := pipe.recv()) > 0:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            engine.step(rows, 1e-3)
        pipe.send(((time.perf_counter() - start) / steps, (time.process_time() - cpu_start) / steps))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    os.environ.update(ACCELERATORS["cpu"].environment)
    context = get_context("spawn")
    for strategy in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory() as folder:
            pipes: dict[str, list[Connection]] = {}
            for level in LEVELS:
                ends = [context.Pipe() for _ in range(arguments.ranks)]
                for number, (_, theirs) in enumerate(ends):
                    rank_arguments = (theirs, level, strategy, number, arguments.ranks, f"{folder}/{level}")
                    context.Process(target=rank, args=rank_arguments, daemon=True).start()
                pipes[level] = [ours for ours, _ in ends]
            wall: dict[str, list[float]] = {level: [] for level in LEVELS}
            cpu_seconds: dict[str, list[float]] = {level: [] for level in LEVELS}
            for turn in range(arguments.rounds + 1):
                for level in LEVELS:
                    for pipe in pipes[level]:
                        pipe.send(arguments.steps if turn else WARM_UP)
                    results = [pipe.recv() for pipe in pipes[level]]
                    if turn:
                        wall[level].append(max(seconds for seconds, _ in results))
                        cpu_seconds[level].append(sum(cpu for _, cpu in results))
            for pipe in (pipe for pipes_of_level in pipes.values() for pipe in pipes_of_level):
                pipe.send(0)
        print(
            f"{strategy}, {arguments.ranks} ranks, a step: {_line(wall)}; CPU of all ranks: {_line(cpu_seconds)}",
            flush=True,
        )


def _line(times: dict[str, list[float]]) -> str:
    """The median of each level, and the median of its ratios to `exact` in the same round."""
    ratios = {
        level: statistics.median(value / exact for value, exact in zip(seconds, times["exact"], strict=True))
        for level, seconds in times.items()
    }
    return ", ".join(
        f"{level} {statistics.median(values):.3f} s ({ratios[level]:.3f}x)" for level, values in times.items()
    )


if __name__ == "__main__":
    main()
