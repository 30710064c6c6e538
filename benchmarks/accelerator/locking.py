"""How long a training loop stands still while host memory is locked for copies from the device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.accelerator.request import Request
from holdfast.launch.device import local_device


def measure_locking(request: Request) -> None:
    """Locking of new memory by CUDA alone, and of memory whose pages exist. Without a CUDA device only the touching."""
    device = local_device(request.accelerator)
    size = 2**26 if request.tiny else 2**33
    loop = TrainingLoop(device, 64 if request.tiny else 8192)
    results: dict[str, Any] = {"bytes": size, "calm_step_ms": 1e3 * loop.calm}
    new, touched = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    if device.type == "cuda":
        results["lock_new"] = loop.during(lambda: lock(new))
    results["touch"] = loop.during(touched[::4096].zero_)
    if device.type == "cuda":
        results["lock_touched"] = loop.during(lambda: lock(touched))
    request.write(results)


def lock(memory: torch.Tensor) -> None:
    """Lock the pages of `memory`. Raises RuntimeError with CUDA's code."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister: {code}")


class TrainingLoop:
    """Steps like those of training: a few large products, many small kernels, and one wait for the device."""

    def __init__(self, device: torch.device, width: int) -> None:
        self._device = device
        self._large = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        self._small = torch.randn(256, 256, device=device)
        self.calm = statistics.median(self._step() for _ in range(100))  # seconds

    def _step(self) -> float:
        began = time.perf_counter()
        for _ in range(6):
            torch.mm(self._large, self._large)
            for _ in range(60):
                self._small.add_(0.001)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter() - began

    def during(self, work: Callable[[], object]) -> dict[str, float]:
        """Run `work` in a thread next to the loop: its seconds, and what the steps lost meanwhile."""
        failures: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                failures.append(error)

        thread, times, began = threading.Thread(target=guarded), [], time.perf_counter()
        thread.start()
        while thread.is_alive():
            times.append(self._step())
        thread.join()
        if failures:
            raise failures[0]
        lost = sum(times) - self.calm * len(times)
        return {"seconds": time.perf_counter() - began, "lost_s": lost, "longest_step_s": max(times, default=0.0)}
