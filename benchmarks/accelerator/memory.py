"""Memory of one step against the plan."""

from __future__ import annotations

import gc
from typing import Any

import torch

from benchmarks.accelerator.request import Request
from benchmarks.accelerator.workload import DOCUMENTS, engine_for, fill, rows_for, settle, shapes, spec_for
from holdfast.launch.device import device_name, local_device


def measure_memory(request: Request) -> None:
    """Peak bytes of a step against the plan, for several shapes."""
    from benchmarks._living import Living

    device, results = local_device(request.accelerator), {}
    cases = [("small", "none", 1), ("small", "selective", 1), ("small", "full", 1), ("large", "none", 1)]
    cases += [("small", "none", DOCUMENTS), ("large", "none", DOCUMENTS)]
    for size, checkpointing, documents in [("tiny", "none", 1), ("tiny", "full", 1)] if request.tiny else cases:
        model, vocabulary, _, global_batch = shapes(size)
        spec = spec_for(
            size, request.accelerator, precision="bf16", activation_checkpointing=checkpointing, masks=documents > 1
        )
        terms = planned_bytes(spec, vocabulary, device)
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        engine = engine_for(spec, vocabulary)
        fill(engine)
        rows = rows_for(1, global_batch, model["context"], vocabulary, documents)
        if cuda:
            engine.step(rows, 1e-4)
            settle(device)
            free, total = torch.cuda.mem_get_info(device)
            peak, extra = (
                torch.cuda.max_memory_allocated(),
                {
                    "before": before,
                    "reserved": torch.cuda.max_memory_reserved(),
                    "device_in_use": total - free,
                },
            )
        else:
            with Living([box.data for box in engine.boxes()]) as living:
                engine.step(rows, 1e-4)
            peak, extra = living.peak, {}
        plan = sum(size for name, size in terms.items() if name != "fragmentation" and "driver" not in name)
        results[f"{size} {checkpointing}" + (" documents" if documents > 1 else "")] = {
            "peak": peak,
            "planned": plan,
            "planned_over_peak": plan / peak,
            "planned_whole": sum(terms.values()),
            **extra,
            "terms": terms,
        }
        request.write(results)
        del engine
        gc.collect()


def planned_bytes(spec: Any, vocabulary: int, device: torch.device) -> dict[str, float]:
    """The planner's terms for one rank."""
    from holdfast.planning import ACCELERATORS
    from holdfast.planning.hardware import by_device
    from holdfast.planning.layout import Layout
    from holdfast.planning.memory import memory
    from holdfast.planning.practice import Updates, practice_here
    from holdfast.planning.shape import Architecture

    kind = "nvidia" if device.type == "cuda" else "cpu"
    layout = Layout(micro_batch=spec.training.micro_batch, checkpointing=spec.training.activation_checkpointing)
    practice = practice_here(spec.training.precision, layout, kind, Updates.of(spec.training))
    return dict(
        memory(
            Architecture.of(spec.model, vocabulary),
            layout,
            by_device(device_name(device)) or ACCELERATORS["H100"].model_copy(update={"kind": kind}),
            global_batch=spec.training.global_batch,
            precision=spec.training.precision,
            practice=practice,
        ).terms
    )
