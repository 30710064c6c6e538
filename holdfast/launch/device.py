"""The device of this rank and its process group."""

import importlib
import os
import platform
import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from holdfast.collectives import use_json_for_objects
from holdfast.launch.accelerators import ACCELERATORS, backend_of
from holdfast.runtime.node import listen_as
from holdfast.spec.cluster import COLLECTIVE_TIMEOUT_MINUTES as TIMEOUT_MINUTES
from holdfast.spec.errors import MissingError

STORE_TIMEOUT = timedelta(minutes=10)  # of a store for which no rank has set another one
MEETING_VARIABLE = "HOLDFAST_MEETING_FILE"  # names the file through which ranks on one node meet


def local_device(kind: str) -> torch.device:
    """The CPU, or this rank's accelerator of that kind. Raises MissingError if its module or device is missing."""
    accelerator = ACCELERATORS[kind]
    if accelerator.device == "cpu":
        return torch.device("cpu")
    field, remedy = f"cluster.accelerator: {kind}", "use --set cluster.accelerator=cpu"
    for module in accelerator.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingError(
                f"{field} needs the module {module}, and importing it failed ({error}); use the image of {kind}, "
                f"or {remedy}"
            ) from error
    runtime = getattr(torch, accelerator.device, None)
    count = 0 if runtime is None else runtime.device_count()
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if count <= index:
        raise MissingError(
            f"{field} needs {index + 1} devices, this machine has {count}; {remedy}, or fewer parallel.processes"
        )
    assert runtime is not None
    if accelerator.device == "cuda":
        built = "nvidia" if torch.version.hip is None else "amd"
        if built != kind:
            raise MissingError(f"{field}, and this torch is built for {built}; use --set cluster.accelerator={built}")
    runtime.set_device(index)
    return torch.device(accelerator.device, index)


def join_gang(device: torch.device, always: bool = False, timeout_minutes: float = TIMEOUT_MINUTES) -> None:
    """Initialize the process group from torchrun's environment. One process needs none, unless `always`. A collective
    of any group fails after `timeout_minutes`. The ports that this rank opens are reachable only where needed: see
    `gang_store`."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not always:
        return
    if device.type == "cuda":  # NCCL's flight recorder: the collectives of each rank when one times out
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    use_json_for_objects()
    timeout = timedelta(minutes=timeout_minutes)
    # Groups of a device mesh use the default: torch has no other way to set it.
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    backend, store = backend_of(device.type), gang_store(timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def gang_store(timeout: timedelta) -> dist.Store | None:
    """The store through which the ranks find each other's addresses. A file if all ranks are on one node. In an elastic
    gang, a TCP store that rank 0 hosts on its known address. None for torchrun's store."""
    store: dist.Store
    if path := os.environ.get(MEETING_VARIABLE):
        store = dist.FileStore(path, -1)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        hosts, address, port = os.environ["RANK"] == "0", os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = tcp_store(address, port, hosts=hosts, timeout=timeout)
    else:
        return None
    store.set_timeout(timeout)
    return store


def tcp_store(host: str, port: int, *, hosts: bool, timeout: timedelta, world: int | None = None) -> dist.TCPStore:
    """A client of the TCP store at `host`, or with `hosts` the store itself. It listens on that address only; torch's
    own store listens on all interfaces. Raises OSError, RuntimeError."""
    if not hosts:
        return dist.TCPStore(host, port, world, False, timeout, multi_tenant=True)
    with listen_as(host, port) as listener:
        return dist.TCPStore(
            host,
            listener.getsockname()[1],
            world,
            True,
            timeout,
            wait_for_workers=world is not None,
            multi_tenant=True,
            master_listen_fd=os.dup(listener.fileno()),
        )


def device_name(device: torch.device) -> str:
    """The model of the accelerator, or of the CPU with the numbers by which kernels are selected: virtual machines give
    many models the same name."""
    if device.type != "cpu":
        return str(getattr(torch, device.type).get_device_name(device))
    info = Path("/proc/cpuinfo")
    cpu_info = dict(re.findall(r"^([\w ]+?)\s*:\s*(.+?)\s*$", info.read_text(), re.M)) if info.exists() else {}
    if "model name" not in cpu_info:
        return platform.processor() or platform.machine()
    numbers = [
        f"{field.removeprefix('cpu ')} {cpu_info[field]}" for field in ("cpu family", "model") if field in cpu_info
    ]
    return cpu_info["model name"] + (f" ({', '.join(numbers)})" if numbers else "")
