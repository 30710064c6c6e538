"""The machine: what it is, and its health check."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from benchmarks.accelerator.request import Request
from holdfast.launch.device import local_device


def describe_machine(request: Request) -> None:
    """The machine of the measurement."""
    cuda = torch.cuda.is_available()
    request.write(
        {
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
            "memory": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
            "cuda_device": cuda,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
    )


def check_health(request: Request) -> None:
    """The product's health check of this rank."""
    from holdfast.collectives import Gang
    from holdfast.health.examine import examine
    from holdfast.store import open_store

    device, seconds = local_device(request.accelerator), 0.5 if request.tiny else 5.0
    store = open_store(f"file://{request.store}/store")
    report = examine(Gang(), device, store, "health/", Path(request.store), seconds, "benchmark")
    request.write({"failures": len(report.failures), "report": report.model_dump(mode="json")})
