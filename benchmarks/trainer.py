"""Bar T1: tokens/s of the whole trainer against a bare PyTorch loop over the same model and the same batches.

`python -m benchmarks.trainer [--steps N] [--rounds N]` trains the quickstart's model both ways, alternately (A B A B),
on two processes with DDP, and prints the ratio of medians. Holdfast runs as a user runs it: observers, checkpoints
every 50 steps, verified data. The bare loop reads its batches from memory and only computes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.launch.accelerators import ACCELERATORS

SPEC = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
WARM = 10  # steps left out of the measurement, of either kind


def bare_rank(steps: int, batches: Path, out: Path) -> None:
    """One rank of the bare loop: forward, backward, clip, AdamW. Nothing else."""
    from holdfast.engines.torch.optimizers import decay_groups
    from holdfast.model.decoder import Decoder
    from holdfast.model.initialise import initialise
    from holdfast.spec import load_spec

    spec = load_spec(SPEC)
    torch.set_num_threads(spec.parallel.threads)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    decoder = Decoder(spec.model, spec.data.tokenizer.vocabulary)
    initialise(decoder, 0)
    model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(decay_groups(decoder, 0.1), lr=1e-3, betas=(0.9, 0.95), fused=True)
    rows = torch.load(batches, mmap=True).chunk(world, dim=1)[rank].contiguous()
    stamps = []
    for step in range(steps):
        micro_batches = rows[step].split(spec.training.micro_batch)
        for micro_batch in micro_batches:
            loss = model(micro_batch[:, :-1], micro_batch[:, 1:]) / len(micro_batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        stamps.append(time.perf_counter())
    if rank == 0:
        out.write_text(str((len(stamps) - 1 - WARM) / (stamps[-1] - stamps[WARM])))
    dist.destroy_process_group()


def bare(steps: int, batches: Path, folder: Path) -> float:
    """Steps per second of the bare loop."""
    out = folder / "bare"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["benchmarks.trainer", "--bare-rank", str(out), "--steps", str(steps), "--batches", str(batches)]
    environment = {**os.environ, **ACCELERATORS["cpu"].environment, "OMP_NUM_THREADS": "1"}  # the same allocator
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return float(out.read_text())


def holdfast(steps: int, store_url: str, dataset_id: str, salt: str) -> float:
    """Steps per second of the trainer, by the times in its history."""
    from holdfast.components.train import run
    from holdfast.spec import load_spec
    from holdfast.store import open_store
    from holdfast.telemetry import read_history

    spec = load_spec(SPEC, [f"training.steps={steps}"])
    store = open_store(store_url)
    result = run(spec, dataset_id, store, salt)
    rows = read_history(store, result.run_id)
    return (len(rows) - 1 - WARM) / (rows[-1]["time"] - rows[WARM]["time"])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare-rank", type=Path)
    parser.add_argument("--batches", type=Path)
    arguments = parser.parse_args()
    if arguments.bare_rank:
        bare_rank(arguments.steps, arguments.batches, arguments.bare_rank)
        return

    from holdfast.components.preprocess import run as preprocess
    from holdfast.dataset import Dataset
    from holdfast.spec import load_spec
    from holdfast.store import open_store

    spec = load_spec(SPEC)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HOLDFAST_HOME"] = str(folder / "home")
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        store = open_store(f"file://{folder / 'store'}")
        prepared = preprocess(spec, store)
        dataset = Dataset.open(store, prepared.dataset_id, folder / "cache")
        training = dataset.training(spec.model.context, spec.training.global_batch, spec.training.seed, weights=None)
        batches = folder / "batches.pt"
        rows = [torch.from_numpy(training.batch(step)).long() for step in range(arguments.steps)]
        torch.save(torch.stack(rows), batches)
        bares, ours = [], []
        for turn in range(arguments.rounds):
            bares.append(bare(arguments.steps, batches, folder))
            ours.append(holdfast(arguments.steps, store.url, prepared.dataset_id, f"round-{turn}"))
    tokens = spec.training.global_batch * spec.model.context
    ratios = sorted(our / other for our, other in zip(ours, bares, strict=True))
    print(
        f"trainer: {statistics.median(ours) * tokens:.0f} tokens/s, bare loop {statistics.median(bares) * tokens:.0f}; "
        f"ratio {statistics.median(ours) / statistics.median(bares):.3f} "
        f"(pairs {ratios[0]:.3f} to {ratios[-1]:.3f}, {arguments.rounds} rounds of {arguments.steps} steps)"
    )


if __name__ == "__main__":
    main()
