"""The attention and the kernels of one step."""

from __future__ import annotations

from benchmarks.accelerator.request import Request
from benchmarks.accelerator.workload import DOCUMENTS, engine_for, fill, rows_for, settle, shapes, spec_for
from holdfast.launch.device import local_device


def measure_kernels(request: Request) -> None:
    """Which attention and which kernels one bf16 step runs, with and without document masks."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    size, device, results = "tiny" if request.tiny else "small", local_device(request.accelerator), {}
    model, vocabulary, _, global_batch = shapes(size)
    for masks in (False, True):
        spec = spec_for(size, request.accelerator, determinism="exact", precision="bf16", masks=masks)
        engine = engine_for(spec, vocabulary)
        fill(engine)
        rows = rows_for(1, global_batch, model["context"], vocabulary, DOCUMENTS if masks else 1)
        engine.step(rows, 1e-3)
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *cuda]) as profiler:
            engine.step(rows, 1e-3)
            settle(device)
        events = profiler.key_averages()
        on_device = [event for event in events if event.device_type == DeviceType.CUDA]
        on_device.sort(key=lambda event: -event.self_device_time_total)
        operations = sorted({e.key for e in events if "dot_product" in e.key or "_attention" in e.key})
        results["document masks" if masks else "plain"] = {
            "attention": operations,
            "attention_kernels": [
                event.key[:200]
                for event in on_device
                if any(part in event.key.lower() for part in ("flash", "fmha", "attention", "sdpa"))
            ],
            "math": any("attention_math" in name for name in operations),
            "top": [
                [event.key[:160], round(event.self_device_time_total / 1e3, 3), event.count] for event in on_device[:20]
            ],
        }
        request.write(results)
