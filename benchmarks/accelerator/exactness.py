"""Exactness and recovery: training that is killed and resumed has the digest of training without interruption."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.accelerator.request import Request
from benchmarks.accelerator.workload import engine_for, rows_for, settle, shapes, spec_for
from holdfast.launch.device import join_gang, local_device

STEPS, SAVE_EVERY, KILL_AFTER = 12, 3, 7


def train_exactly(request: Request) -> None:
    """Train to the last step with saves, from the newest checkpoint; ends by SIGKILL after a step if `kill`."""
    from holdfast.checkpoint import Checkpointer, Retention, SaveOptions, claim_attempt
    from holdfast.collectives import Gang
    from holdfast.engines.weights import SeededState
    from holdfast.store import open_store

    size = "tiny" if request.tiny else "small"
    model, vocabulary, _, global_batch = shapes(size)
    spec = spec_for(size, request.accelerator, determinism="exact", precision="bf16")
    device, times = local_device(request.accelerator), {"start": time.time()}
    join_gang(device, always=True)
    gang, store = Gang(), open_store(request.store)
    engine = engine_for(spec, vocabulary)
    attempt = claim_attempt(store, request.run_id, launch=request.launch)
    saver = Checkpointer(
        store,
        attempt,
        Retention(2),
        describe={"dataset_id": "none", "layout": engine.layout, "random": {}},
        gang=gang,
        options=SaveOptions(max_lag_steps=SAVE_EVERY),
    )
    times["engine"] = time.time()
    began = saver.restore(engine.boxes(), SeededState(spec.model, 0).fill)
    engine.restored(began)
    times["state"] = time.time()
    losses = []
    for step in range(began + 1, STEPS + 1):
        out = engine.step(rows_for(step, global_batch, model["context"], vocabulary), 1e-3, saver.wait_for_staging)
        losses.append(out.loss.item())
        times.setdefault("first_step", time.time())
        if request.kill and step == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % SAVE_EVERY == 0:
            saver.save(step, engine.saved(), engine.scalars(step))
            if request.kill:
                saver.wait()  # a checkpoint exists when the process dies
    saver.wait()
    reduced = torch.arange(1 << 20, device=device, dtype=torch.float32) / 3
    before = reduced.clone()
    dist.all_reduce(reduced)
    settle(device)
    request.write(
        {
            "from_step": began,
            "digest": digest(engine.boxes()),
            "last_loss": losses[-1],
            "times": times,
            "backend": dist.get_backend(),
            "all_reduce_same_bits": bool(torch.equal(before, reduced)),
        }
    )
    saver.close()
    dist.destroy_process_group()


def digest(boxes: Iterable[Any]) -> str:
    """BLAKE3 of names and bytes of the state."""
    from blake3 import blake3

    hasher = blake3()
    for box in sorted(boxes, key=lambda each: each.name):
        hasher.update(box.name.encode())
        hasher.update(box.data.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
