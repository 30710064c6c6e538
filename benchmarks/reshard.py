"""K4: the bytes read to load a state at another layout, over the bytes needed.

`python -m benchmarks.reshard` saves a state of 498 MiB as 1 to 4 ranks would, cut by rows, by columns or by both. It
loads the state as 1 to 8 ranks would, cut in each of these ways, and compares every bit. It prints the ratio (all bytes
read from the store, root and indexes included, over those of the boxes) and the requests of one rank.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.counting import CountingStore
from holdfast.checkpoint import Attempt, TensorBox, open_checkpoint
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.store import open_store

RUN, WAYS = "reshard", ("rows", "columns", "both")
WRITERS, READERS = (1, 2, 3, 4), (1, 2, 3, 4, 6, 8)
FIELDS: dict[str, Any] = {"dataset_id": "d", "layout": {}, "random": {}}
SHAPES = {
    "embed": (32000, 1024),
    "q": (2048, 2048),
    "up": (5504, 2048),
    "down": (2048, 5504),
    "norm": (2048,),
    "expert": (4, 1024, 1408),
}


def boxes(state: dict[str, torch.Tensor], rank: int, ranks: int, way: str) -> list[TensorBox]:
    """A rank's part of each tensor. Vectors are always cut by rows. A cut by both has two parts of rows."""
    boxes_of_rank = []
    for name, tensor in state.items():
        cuts = {0: (rank, ranks)}
        if tensor.dim() > 1 and way != "rows":
            rows = 2 if way == "both" and ranks % 2 == 0 else 1
            cuts = {0: (rank % rows, rows), 1: (rank // rows, ranks // rows)}
        part, offset = tensor, [0] * tensor.dim()
        for axis, (number, parts) in cuts.items():
            width = -(-tensor.shape[axis] // parts)
            offset[axis] = min(number * width, tensor.shape[axis])
            part = part.narrow(axis, offset[axis], min(width, tensor.shape[axis] - offset[axis]))
        boxes_of_rank.append(TensorBox(name, tuple(tensor.shape), tuple(offset), part.contiguous()))
    return boxes_of_rank


def main() -> None:
    """See the module."""
    torch.manual_seed(0)
    state = {f"{kind}.{name}": torch.randn(shape) for name, shape in SHAPES.items() for kind in ("w", "m")}
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"state of {size / 2**20:.0f} MiB; bytes read / bytes needed")
    memory = Path("/dev/shm")
    ratios: dict[tuple[str, str], list[float]] = {}
    for saved in WAYS:
        for writers in WRITERS:
            folder = tempfile.mkdtemp(prefix="reshard-", dir=memory if memory.is_dir() else None)
            try:
                store = open_store(f"file://{folder}")
                attempt = Attempt(RUN, 1)
                for writer in range(writers):
                    ShardWriter(store, attempt, writer).write(1, boxes(state, writer, writers, saved))
                Committer(store, attempt, writers).commit(1, FIELDS, {})
                for loaded in WAYS:
                    for readers in READERS:
                        counting = CountingStore(store)
                        _load(counting, state, readers, loaded)
                        ratio, requests = counting.read / size, counting.requests / readers
                        ratios.setdefault((saved, loaded), []).append(ratio)
                        what = f"{writers} by {saved:<8} -> {readers} by {loaded:<8}"
                        print(f"    {what} {ratio:.4f}, {requests:.0f} requests a rank", flush=True)
            finally:
                shutil.rmtree(folder)
    for (saved, loaded), values in ratios.items():
        print(f"{saved} -> {loaded}: median {statistics.median(values):.4f}, most {max(values):.4f}")


def _load(store: CountingStore, state: dict[str, torch.Tensor], readers: int, way: str) -> None:
    for rank in range(readers):
        wanted = boxes(state, rank, readers, way)
        targets = [TensorBox(box.name, box.global_shape, box.offset, torch.empty_like(box.data)) for box in wanted]
        open_checkpoint(store, RUN, 1).fill(targets)
        assert all(torch.equal(target.data, other.data) for target, other in zip(targets, wanted, strict=True))


if __name__ == "__main__":
    main()
