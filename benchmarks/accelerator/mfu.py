"""MFU of Holdfast's engine and of a bare torch loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.accelerator.request import Request
from benchmarks.accelerator.workload import DOCUMENTS, engine_for, fill, rows_for, settle, shapes, spec_for
from holdfast.launch.device import device_name, local_device

ROWS = (16, 64)  # of a micro-batch, with 74 GiB at the peak, and of a step of 131,072 tokens


def measure_mfu(request: Request) -> None:
    """Seconds of a step and MFU of one variant: `bare`, `off` or `exact`, with `-documents` and `-compiled`.

    MFU counts the attention of whole rows, and documents need less.
    """
    from holdfast.engines.assignment import Assignment
    from holdfast.rank.measure.throughput import Throughput

    size = "tiny" if request.tiny else "large"
    model, vocabulary, micro, global_batch = shapes(size)
    if not request.tiny:
        micro, global_batch = ROWS
    level, *more = request.variant.split("-")
    documents = DOCUMENTS if "documents" in more else 1
    device = local_device(request.accelerator)
    training: dict[str, object] = {
        "determinism": "exact" if level == "exact" else "off",
        "precision": "bf16",
        "compile": "compiled" in more,
        "micro_batch": micro,
        "global_batch": global_batch,
        "loss_chunk": model["context"],
    }
    training["masks"] = documents > 1
    spec = spec_for(size, request.accelerator, **training)
    began = time.perf_counter()
    step: Callable[[torch.Tensor], object]
    if level == "bare":
        step = bare_step(spec, vocabulary, device, micro)
    else:
        engine = engine_for(spec, vocabulary)
        fill(engine)
        step = lambda rows: engine.step(rows, 1e-4)  # noqa: E731
    batches = [
        rows_for(number, global_batch, model["context"], vocabulary, documents) for number in range(request.steps + 2)
    ]
    for rows in batches[:2]:
        step(rows)
    settle(device)
    work = Throughput.of(Assignment.of(spec, "accelerator", "none"), vocabulary, 1, device_name(device))
    built, times = time.perf_counter() - began, list[float]()
    for rows in batches[2:]:
        start = time.perf_counter()
        step(rows)
        settle(device)
        times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        request.write(
            {
                "step_s": seconds,
                "worst_s": max(times),
                "tokens_per_s": work.tokens / seconds,
                "mfu": work.mfu(seconds),
                "tflops": work.flops / seconds / 1e12,
                "build_s": built,
                "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
                "steps": len(times),
            }
        )


def bare_step(spec: Any, vocabulary: int, device: torch.device, micro: int) -> Callable[[torch.Tensor], None]:
    """A bare torch loop over the same model: autocast, clip, fused AdamW. Layers are compiled if the spec says so."""
    from holdfast.engines.torch.optimizers import parameter_groups
    from holdfast.model.decoder import Decoder

    torch.backends.cuda.matmul.allow_tf32 = True
    with device:
        model = Decoder(spec.model, vocabulary)
    fill(model)
    model.loss_chunk, model.compiled = spec.training.loss_chunk, spec.training.compile
    if spec.training.compile:
        for layer in model.model.layers:
            layer.compile()
    groups = parameter_groups(model.named_parameters(), spec.training.optimizer)
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(rows: torch.Tensor) -> None:
        parts = rows.to(device).split(micro)
        for part in parts:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
