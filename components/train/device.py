"""The device of this rank and its process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from components.spec import Spec
from components.spec.errors import MissingError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def local_device(spec: Spec) -> torch.device:
    """The CPU, or this rank's accelerator. Raises MissingError when the spec asks for one that is not there."""
    if spec.cluster.accelerator == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= index:
        raise MissingError(
            f"cluster.accelerator: {spec.cluster.accelerator} needs {index + 1} devices, this machine has "
            f"{torch.cuda.device_count()}; use --set cluster.accelerator=cpu, or fewer parallel.processes"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def join_gang(device: torch.device, always: bool = False) -> None:
    """Initialise the process group from torchrun's environment. One process needs none, unless `always`."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not always:
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
