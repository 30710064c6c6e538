"""The cost of glibc's allocator for a training step on a CPU, with and without the settings of the local launcher.

`python -m benchmarks.allocator [--rounds N]` runs steps of the quickstart's model on one thread both ways, alternately,
each in a separate process. It prints processor seconds per step, page faults per step and the ratio of medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from holdfast.launch.accelerators import ACCELERATORS

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
STEPS = 15


def measure() -> tuple[float, float]:
    """Processor seconds and page faults of one step, in this process."""
    import torch

    from holdfast.model.decoder import Decoder
    from holdfast.model.initialise import initialise
    from holdfast.spec import load_spec

    spec = load_spec(SPEC)
    torch.set_num_threads(1)
    decoder = Decoder(spec.model, spec.data.tokenizer.vocabulary)
    initialise(decoder, 0)
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    rows = torch.randint(0, spec.data.tokenizer.vocabulary, (spec.training.micro_batch, spec.model.context + 1))

    def steps(count: int) -> None:
        for _ in range(count):
            decoder(rows[:, :-1], rows[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    before = resource.getrusage(resource.RUSAGE_SELF)
    steps(STEPS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds / STEPS, (after.ru_minflt - before.ru_minflt) / STEPS


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        print(*measure())
        return
    results: dict[str, list[tuple[float, float]]] = {"glibc": [], "holdfast": []}
    for _ in range(arguments.rounds):
        for name, settings in (("glibc", {}), ("holdfast", ACCELERATORS["cpu"].environment)):
            command = [sys.executable, "-m", "benchmarks.allocator", "--measure"]
            printed = subprocess.run(
                command, env={**os.environ, **settings}, check=True, capture_output=True, text=True
            ).stdout.split()
            results[name].append((float(printed[0]), float(printed[1])))
    seconds = {name: statistics.median(value for value, _ in pairs) for name, pairs in results.items()}
    faults = {name: statistics.median(value for _, value in pairs) for name, pairs in results.items()}
    print(
        f"allocator: {seconds['holdfast']:.3f} s a step against {seconds['glibc']:.3f} with glibc's defaults, "
        f"page faults {faults['holdfast']:.0f} against {faults['glibc']:.0f}; "
        f"ratio {seconds['glibc'] / seconds['holdfast']:.3f}"
    )


if __name__ == "__main__":
    main()
