"""Scaling: efficiency, communication and recovery against ranks, and jobs per day. `python -m benchmarks.scaling`.

Measured with 1, 2 and 4 ranks of this machine (`--ranks`), each with the same rows: the time of a step, and the time
from `kill -9` of a rank to the next step. Also measured is the share of a step that a sum of all gradients takes if
nothing hides it. Also measured: how many small jobs, from raw text to a registered model, one after another, fill a
day. Not measured: the same for 8 to 1,024 accelerators. It comes from the planner's arithmetic, with its errors here
and against published tables. With more ranks than cores, no efficiency can exceed cores / ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recovery import recoveries
from holdfast.pipelines.measure import calibrate
from holdfast.planning import ACCELERATORS, Architecture, Candidate, Task, estimate_run, search
from holdfast.planning.calibration import Calibration
from holdfast.planning.collectives import Group, all_reduce

# Llama 2 7 B; a step is 4 million tokens.
LLAMA_7B = Architecture(32, 4096, 32, 32, 11008, 4096, 32000)
TRAFFIC = ("data traffic", "tensor traffic", "pipeline traffic", "expert traffic", "context traffic")
JOB = """
name: scaling
data: {sources: [{uri: "%s"}], validation_fraction: 0.1, tokenizer: {vocabulary: 300}}
model: {layers: 2, hidden: 64, heads: 2, context: 64}
training: {steps: 50, global_batch: 8, micro_batch: 4}
evaluation: {max_perplexity: 1000, versus_champion: ignore}
"""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    errors = measured(arguments.ranks, arguments.kills)
    print(f"jobs a day, one after another on this machine: {86_400 / job_seconds(arguments.jobs):,.0f}\n")
    extrapolated(errors)


def measured(sizes: list[int], kills: int) -> list[float]:
    """Print the measurements. Returns predicted over measured of each step."""
    cores, base = len(os.sched_getaffinity(0)), 0.0
    errors: list[float] = []
    print(f"measured here, {cores} cores")
    print("ranks      step  efficiency  bound  sum of gradients  predicted/measured  recovery")
    for ranks in sizes:
        calibration = calibrate(ranks)
        step = max(
            (candidate for candidate in calibration.steps if candidate.strategy == "ddp"),
            key=lambda each: each.micro_batch,
        )
        base = base or step.seconds
        ratio = calibration.step(step).seconds / step.seconds
        errors.append(ratio)
        recovery = statistics.median(sum(parts) for parts in recoveries(kills, ranks))
        print(
            f"{ranks:>5} {step.seconds * 1e3:>6.0f} ms {base / step.seconds:>11.0%} {min(1, cores / ranks):>6.0%} "
            f"{summing(calibration, ranks) / step.seconds:>17.1%} {ratio:>19.2f} {recovery:>7.1f} s",
            flush=True,
        )
    return errors


def summing(one: Calibration, ranks: int) -> float:
    """Seconds in which the gradients of the measured model are added, by the measured line."""
    step = one.steps[0]
    shape = Architecture(
        step.layers, step.hidden, step.heads, step.heads, step.ffn, step.context, step.vocabulary, tied=True
    )
    return all_reduce(4 * shape.parameters, Group(ranks, ranks, one.accelerator()))


def job_seconds(count: int) -> float:
    """Median seconds of a small job from raw text to a registered model, run as a user does."""
    times = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in range(100):  # each a different text, because duplicates are removed
            (folder / f"{file}.txt").write_text("\n".join(f"{number} and {file * number}" for number in range(100)))
        (folder / "spec.yaml").write_text(JOB % (folder / "*.txt"))
        environment = {**os.environ, "HOLDFAST_HOME": str(folder / "home")}
        environment.pop("MLFLOW_TRACKING_URI", None)
        for _ in range(count):
            start = time.monotonic()
            command = [sys.executable, "-m", "holdfast.pipelines.cli", "run", str(folder / "spec.yaml"), "--fresh"]
            subprocess.run(command, env=environment, check=True, capture_output=True)
            times.append(time.monotonic() - start)
    return statistics.median(times)


def extrapolated(errors: list[float]) -> None:
    """Print the planner's estimates for more ranks than this machine has."""
    print(
        "extrapolated by the planner, nothing of it measured: 7 B on H100s, 4 M tokens a step. Its steps were "
        f"{min(errors):.2f} to {max(errors):.2f} of what was measured above, and 0.93 to 1.15 of published ones;\n"
        "no network is contended, and a failure costs 300 s and half an interval between saves\n"
        " ranks   tokens/s  efficiency  traffic  goodput  layout"
    )
    base = math.nan
    for gpus in (8, 64, 512, 1024):
        task = Task(LLAMA_7B, ACCELERATORS["H100"], gpus, steps=250_000, global_batch=1024)
        best: Candidate = search(task, count=1).best[0]
        rate = best.speed.tokens_per_second / gpus
        base = rate if math.isnan(base) else base
        traffic = sum(best.speed.terms.get(name, 0.0) for name in TRAFFIC) / best.speed.seconds
        print(
            f"{gpus:>6} {rate * gpus:>10,.0f} {rate / base:>11.0%} {traffic:>8.1%} "
            f"{estimate_run(best).goodput:>8.1%}  {best.layout}"
        )


if __name__ == "__main__":
    main()
