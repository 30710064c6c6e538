"""Train the tiny runs of every engine and print their state digests as JSON: `python -m tests.golden.train FOLDER`."""

import json
import sys
from itertools import product
from pathlib import Path

from holdfast.checkpoint import read_manifest
from holdfast.spec import run_id
from tests.checkpoint.ranks import in_ranks
from tests.train.ranks import Runs, train_in_ranks
from tests.train.tiny_run import DATASET_ID, new_store, tiny_spec

LAYOUTS = {1: ["ddp"], 2: ["ddp", "fsdp", "zero1", "zero2", "zero3"]}  # number of ranks -> strategies
PRECISIONS = ["fp32", "bf16"]
STEPS = 4


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    store = new_store(folder / "store")
    digests = {"capability": in_ranks(1, _capability)[0]}
    for size, strategies in LAYOUTS.items():
        runs: Runs = []
        for strategy, precision in product(strategies, PRECISIONS):
            name = f"{strategy} on {size} in {precision}"
            changes = (f"parallel.strategy={strategy}", f"parallel.processes={size}", f"training.precision={precision}")
            runs.append(((*changes, f"training.steps={STEPS}"), name, None))
        endings = train_in_ranks(size, store.url, folder / f"ranks-{size}", runs)
        assert endings is not None and not any(endings), endings
        for overrides, name, _ in runs:
            digests[name] = read_manifest(store, run_id(tiny_spec(*overrides), DATASET_ID, name), STEPS).state_digest
    print(json.dumps(digests))


def _capability(rank: int, size: int) -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


if __name__ == "__main__":
    main()
