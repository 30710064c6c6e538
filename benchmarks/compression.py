"""K2: the bytes of a save when the state is compressed without loss, compared with the raw fp32 state.

`python -m benchmarks.compression [--steps N] [--of M]` trains the quickstart's model on the Python standard library in
one process, so the statistics are those of real weights and moments. It saves the state after N of M steps into a new
store. It saves again 1 and 50 steps later, each time against the save after N. It prints the bytes of the new packs as
the file system counts them, and the speed of a save on one thread. The bars are 0.70 at a lag of one step and 0.80 at
50. A last save of the same state shows the cost of unchanged content.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.checkpoint import claim_attempt
from holdfast.checkpoint.compress import Compression
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.components.preprocess import run as preprocess
from holdfast.dataset import Batches, Dataset
from holdfast.engines.assignment import Assignment
from holdfast.engines.interface import Engine, build_engine
from holdfast.engines.weights import SeededState
from holdfast.rank.randomness import make_deterministic
from holdfast.rank.schedule import learning_rate
from holdfast.spec import load_spec
from holdfast.store import Store, layout, open_store

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
LAGS = {1: 0.70, 50: 0.80}  # steps -> the bar


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--of", type=int, default=300, help="steps of the whole schedule")
    arguments = parser.parse_args()
    steps = arguments.steps
    spec = load_spec(SPEC, [f"training.steps={arguments.of}", "parallel.processes=1"])
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"file://{folder}/store")
        dataset_id = preprocess(spec, store).dataset_id
        dataset = Dataset.open(store, dataset_id, Path(folder) / "cache")
        assignment = Assignment.of(spec, "run", dataset_id)
        make_deterministic("exact", 1)
        engine = build_engine(assignment, dataset.vocabulary, dataset.end_of_text)
        SeededState(spec.model, 0).fill(engine.boxes())
        engine.restored(0)
        batches = dataset.training(spec.model.context, spec.training.global_batch, 0)
        train(assignment, engine, batches, 0, steps)
        share = ShardWriter(store, claim_attempt(store, "run"), 0, compression=Compression())
        raw = sum(box.data.nbytes for box in engine.saved())
        print(f"state {raw / 1e6:.1f} MB after {steps} steps")
        report("alone", raw, written(store, lambda: share.write(steps, engine.saved())), None)
        done = steps
        for lag, bar in LAGS.items():
            train(assignment, engine, batches, done, steps + lag)
            done = steps + lag
            report(f"{lag} steps later", raw, written(store, lambda: share.write(done, engine.saved())), bar)  # noqa: B023
        report("unchanged", raw, written(store, lambda: share.write(done + 1, engine.saved())), 0.0)


def train(assignment: Assignment, engine: Engine, batches: Batches, start: int, stop: int) -> None:
    """Train the steps in [start, stop)."""
    for step in range(start, stop):
        engine.step(torch.from_numpy(batches.batch(step)), learning_rate(assignment.training, step))


def written(store: Store, save: Callable[[], object]) -> tuple[int, float]:
    """The bytes that a save adds to the packs of the run, and its seconds."""

    def size() -> int:
        return sum(info.size for info in store.list(layout.run("run", "packs/")))

    before, start = size(), time.perf_counter()
    save()
    return size() - before, time.perf_counter() - start


def report(what: str, raw: int, found: tuple[int, float], bar: float | None) -> None:
    """Print one line of figures."""
    size, seconds = found
    bar_text = "" if bar is None else f" (bar {bar:.2f})"
    print(f"{what:>16}: {size / raw:.3f}x of the raw bytes{bar_text}, {raw / seconds / 1e6:.0f} MB/s, digests and all")


if __name__ == "__main__":
    main()
