"""K6: the cost of a checkpoint of a 70 B model for each rank of a large gang, apart from the bytes of its tensors.

`python -m benchmarks.checkpoint_scale [--writers 64 256 1024]` saves twice, restores one rank and collects. It runs the
production code against the file store in memory, one writer after another. It prints seconds, peak memory and bytes for
each role. The tensor list is that of Llama 3 70 B with weights and both moments in fp32, cut by rows as FSDP does.

Simulated: no tensor byte is allocated, hashed, written or read. Each piece has a random digest and one byte in its
pack; a pack holds its usual number of pieces. Everything else is real: boxes, grid, coverage, indexes, nodes, root,
listings, the reader's choice of indexes and ranges, and the collector.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.counting import CountingStore
from holdfast.checkpoint import (
    Attempt,
    Retention,
    StateDigest,
    TensorBox,
    open_checkpoint,
    packing,
    shard_writer,
    tiles,
)
from holdfast.checkpoint.box import PIECE_BYTES
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.checkpoint.tree import FANOUT
from holdfast.store import open_store

RUN, SAMPLES = "scale", 8  # measured members of each role, each in a separate process
FIELDS: dict[str, Any] = {"dataset_id": "d", "layout": {"strategy": "fsdp"}, "random": {"seed": 0}}


def tensors() -> dict[str, tuple[int, ...]]:
    """The global tensors of the state."""
    hidden, ffn, vocabulary, kv = 8192, 28672, 128256, 1024
    block = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    weights: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(80):
        weights |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {
        f"{kind}{name}": shape
        for kind in ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
        for name, shape in weights.items()
    }


def boxes(rank: int, ranks: int) -> list[TensorBox]:
    """The rows that FSDP gives to a rank, without their bytes."""
    boxes_of_rank = []
    for name, shape in tensors().items():
        rows = -(-shape[0] // ranks)
        low, high = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        data = torch.empty((high - low, *shape[1:]), device="meta")
        boxes_of_rank.append(TensorBox(name, shape, (low, *(0 for _ in shape[1:])), data))
    return boxes_of_rank


class BytelessShare(ShardWriter):
    """The share of a writer whose pieces have random digests and one byte each."""

    def _hashed(self, boxes: Sequence[TensorBox]) -> list[packing.Piece]:
        random_bytes = random.Random(f"{self._writer} {time.monotonic_ns()}").randbytes
        byte = memoryview(b"\0")
        return [
            packing.Piece(number, low, byte, (random_bytes(16), box.dtype_name), tiles.Form(1, (1,)))
            for number, box in enumerate(boxes)
            for low in [0, *packing.cuts_of(box)[:-1]]
        ]


def apart(work: Callable[[CountingStore], Any], url: str) -> dict[str, float]:
    """The cost of `work` in a separate process: seconds, peak memory beyond the process itself, bytes, requests."""
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        try:
            store = CountingStore(open_store(url))
            before, began = psutil.Process().memory_info().rss, time.perf_counter()
            work(store)
            seconds = time.perf_counter() - began
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            costs = {"s": seconds, "MiB": peak / 2**20, "read": store.read, "put": store.written, "n": store.requests}
            os.write(sender, json.dumps(costs).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as results:
        text = results.read()
    os.waitpid(child, 0)
    result: dict[str, float] = json.loads(text)
    return result


def measure(writers: int, url: str) -> None:
    """Save twice, restore, collect, and print the cost of each role."""
    attempt = Attempt(RUN, 1)
    costs: dict[str, list[dict[str, float]]] = {"writer": [], "leader of 32": [], "root": [], "collector": []}

    def write(store: CountingStore, step: int, writer: int) -> None:
        BytelessShare(store, attempt, writer).write(step, boxes(writer, writers), StateDigest())

    def lead(store: CountingStore, step: int, writer: int) -> None:
        Committer(store, attempt, writers).lead(step, writer)

    def commit(store: CountingStore, step: int) -> None:
        Committer(store, attempt, writers).commit(step, FIELDS, {"optimizer.step": step})

    def restore(store: CountingStore, rank: int, ranks: int) -> None:
        open_checkpoint(store, RUN, 20).uses(boxes(rank, ranks))

    here = CountingStore(open_store(url))
    for step in (10, 20):
        for writer in range(writers):
            if writer % (writers // SAMPLES) or step == 10:
                write(here, step, writer)
            else:
                costs["writer"].append(apart(lambda store, at=step, who=writer: write(store, at, who), url))  # type: ignore[misc]
        for writer in range(0, writers, FANOUT) if writers > FANOUT else ():
            if writer % (writers // min(SAMPLES, writers // FANOUT)) or step == 10:
                lead(here, step, writer)
            else:
                costs["leader of 32"].append(apart(lambda store, at=step, who=writer: lead(store, at, who), url))  # type: ignore[misc]
        costs["root"].append(apart(lambda store, at=step: commit(store, at), url))  # type: ignore[misc]
    for ranks in (writers, writers * 3 // 4, writers // 8):
        name = f"restore of one rank of {ranks}"
        picked = sorted({0, ranks // 3, ranks // 2, ranks - 1})
        costs[name] = [apart(lambda store, who=rank, of=ranks: restore(store, who, of), url) for rank in picked]  # type: ignore[misc]
    costs["collector"].append(apart(lambda store: Collector(store, attempt, Retention(1)).collect(20), url))
    print(f"{writers} writers, {len(tensors())} tensors, pieces of {PIECE_BYTES >> 10} KiB")
    for role, role_costs in costs.items():
        if role_costs:
            print(
                "   ",
                role.ljust(28),
                "  ".join(_line(name, [cost[name] for cost in role_costs]) for name in role_costs[0]),
            )
    collector = costs["collector"][0]
    milliseconds, kibibytes = collector["s"] / writers * 1e3, collector["read"] / writers / 1024
    print(f"    collector, for each writer   {milliseconds:.2f} ms, {kibibytes:.1f} KiB")


def _line(name: str, values: list[float]) -> str:
    middle, most = statistics.median(values), max(values)
    if name in ("read", "put"):
        return f"{name} {middle / 2**20:.2f} (max {most / 2**20:.2f}) MiB"
    if name == "n":
        return f"{middle:.0f} (max {most:.0f}) requests"
    return f"{middle:.2f} (max {most:.2f}) {name}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--writers", nargs="+", type=int, default=[64, 256, 1024])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    packing.PACK_BYTES //= PIECE_BYTES  # one byte each
    setattr(shard_writer, "_require_finite", lambda *_: None)  # noqa: B010 - of what has no bytes
    memory = Path("/dev/shm")
    for writers in arguments.writers:
        folder = tempfile.mkdtemp(prefix="scale-", dir=memory if memory.is_dir() else None)
        try:
            measure(writers, f"file://{folder}")
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
