"""The cost of a save for training, and rates of copies from the device."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.accelerator.request import Request
from benchmarks.accelerator.workload import engine_for, fill, rows_for, settle, shapes, spec_for
from holdfast.launch.device import local_device


def measure_stall(request: Request) -> None:
    """The cost of a save for training, compared with `torch.save` and DCP's async_save; and copies from the device."""
    from holdfast.checkpoint import Checkpointer, Retention, SaveOptions, claim_attempt
    from holdfast.store import open_store

    ends = time.perf_counter() + request.seconds
    size, device = "tiny" if request.tiny else "large", local_device(request.accelerator)
    results: dict[str, Any] = {"copies": copy_rates(device, 2**20 if request.tiny else 2**30)}
    request.write(results)
    model, vocabulary, _, global_batch = shapes(size)
    engine = engine_for(spec_for(size, request.accelerator, precision="bf16"), vocabulary)
    fill(engine)
    folder, store = Path(request.store), open_store(f"file://{request.store}/store")
    saver = Checkpointer(
        store,
        claim_attempt(store, "stall", launch=1),
        Retention(1),
        options=SaveOptions(max_lag_steps=1000),
        describe={"dataset_id": "none", "layout": engine.layout, "random": {}},
    )
    done, following = 0, 4  # steps after a save that are compared with steps without

    def steps(count: int) -> float:
        nonlocal done
        start = time.perf_counter()
        for _ in range(count):
            done += 1
            engine.step(rows_for(done, global_batch, model["context"], vocabulary), 1e-4, saver.wait_for_staging)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # not the stream of a copy
        return time.perf_counter() - start

    steps(2)
    calm = steps(following)
    state = engine.saved()
    state_bytes = sum(box.data.numel() * box.data.element_size() for box in state)
    results |= {"state_bytes": state_bytes, "step_s": calm / following, "saves": []}
    for number in range(3):
        if number and time.perf_counter() + 1.5 * results["saves"][-1]["commit_s"] > ends - 10:
            break
        before, start = saver.stall_seconds, time.perf_counter()
        saver.save(done, engine.saved(), engine.scalars(done))
        steps(following)
        took = time.perf_counter() - start
        waited = saver.stall_seconds - before
        saver.wait()
        results["saves"].append(
            {
                "host_stall_s": waited,
                "slower_s": took - calm,
                "commit_s": time.perf_counter() - start,
                "bytes_in_store": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
            }
        )
        request.write(results)
    saver.close()
    shutil.rmtree(folder / "store")
    tensors = {box.name: box.data.detach() for box in state}
    if time.perf_counter() + 1.5 * results["saves"][-1]["commit_s"] < ends:
        results |= torch_save(tensors, folder / "state.pt")
        request.write(results)
    if time.perf_counter() + 5 < ends:
        for part in dcp_async_save(tensors, folder / "dcp"):
            results |= part
            request.write(results)


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, float]:
    """Seconds of `torch.save`, without and with fsync."""
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save(tensors, file)
        saved = time.perf_counter() - start
        file.flush()
        os.fsync(file.fileno())
        synced = time.perf_counter() - start
    path.unlink()
    return {"torch_save_s": saved, "torch_save_and_fsync_s": synced}


def dcp_async_save(tensors: dict[str, torch.Tensor], folder: Path) -> Iterator[dict[str, float]]:
    """Seconds of the call of DCP's async_save; then seconds until it is complete."""
    import torch.distributed.checkpoint as dcp

    start = time.perf_counter()
    pending: Any = dcp.async_save(tensors, checkpoint_id=folder)
    yield {"dcp_async_save_call_s": time.perf_counter() - start}
    pending.result()
    yield {"dcp_async_save_s": time.perf_counter() - start}


def copy_rates(device: torch.device, size: int) -> dict[str, Any]:
    """Rates of copies from the device to pageable and to pinned memory."""
    source = torch.ones(size // 4, device=device)
    rates_by_name: dict[str, Any] = {"bytes": size}
    for name, pinned in (("pageable", False), ("pinned", True)):
        if pinned and device.type != "cuda":
            continue
        target = torch.zeros(size // 4, pin_memory=pinned)
        rates = []
        for _ in range(5):
            start = time.perf_counter()
            target.copy_(source, non_blocking=pinned)
            settle(device)
            rates.append(size / (time.perf_counter() - start) / 1e9)
        rates_by_name[f"{name}_gb_per_s"] = statistics.median(rates)
    return rates_by_name
