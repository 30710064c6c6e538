"""Accelerators behind one word: what Kubernetes, the container and torch each call them.

Promises one table that the emitters and the trainer read alike. Leaves torch to the trainer: nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType

from holdfast.spec.cluster import Toleration

# What NVIDIA's device plugin appends to the name of a resource that it shares by time or by MPS (`renameByDefault`).
SHARED = "shared"


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator."""

    device: str  # torch's device type
    backend: str  # torch's collective backend on that device
    resource: str | None = None  # the extended resource of Kubernetes; one for each process
    gres: str | None = None  # the generic resource of Slurm
    modules: tuple[str, ...] = ()  # what must be imported before torch knows the device and its backend
    environment: Mapping[str, str] = field(default_factory=dict)
    slices: str | None = None  # a resource that is a share of one, with `{}` for the name of the share


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "cpu": Accelerator(
            "cpu",
            "gloo",
            # glibc gives large blocks back to the kernel at every free, and the next step pays for every page again:
            # an eighth of the time of the quickstart's steps (benchmarks/allocator.py).
            environment={"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
        ),
        "nvidia": Accelerator("cuda", "nccl", "nvidia.com/gpu", "gpu", slices="nvidia.com/mig-{}"),
        "amd": Accelerator("cuda", "nccl", "amd.com/gpu", "gpu", slices="amd.com/{}"),  # ROCm and RCCL keep the names
        "ascend": Accelerator(
            "npu",
            "hccl",
            "huawei.com/Ascend910",
            "npu",
            modules=("torch_npu",),
            environment={"HCCL_DETERMINISTIC": "true"},  # sums are reordered from run to run otherwise
        ),
        "gaudi": Accelerator(
            "hpu",
            "hccl",
            "habana.ai/gaudi",
            "gaudi",
            modules=("habana_frameworks.torch.core", "habana_frameworks.torch.distributed.hccl"),
            environment={"PT_HPU_LAZY_MODE": "0"},  # FSDP2 and torch.compile need the eager mode
        ),
        # A word for the emitters; the rules refuse to train on it: no engine speaks XLA.
        "tpu": Accelerator("xla", "xla", "google.com/tpu", "tpu", modules=("torch_xla",)),
    }
)


def training_image(kind: str) -> str:
    """The image of the training job for a kind of accelerator, unless the spec names another."""
    return f"holdfast-train-{kind}:{version('holdfast')}"


def ray_image(kind: str) -> str:
    """The image of the nodes of a Ray, each of which runs every step, unless the spec names another."""
    return f"holdfast-ray-{kind}:{version('holdfast')}"


def slice_resource(kind: str, name: str) -> str:
    """The Kubernetes resource of a share of an accelerator: `nvidia.com/mig-1g.10gb`, or `nvidia.com/gpu.shared`."""
    found = ACCELERATORS[kind]
    assert found.slices is not None, f"the rules refuse slices of {kind}"
    return f"{found.resource}.{SHARED}" if name == SHARED else found.slices.format(name)


def taint_of(kind: str) -> Toleration:
    """What lets a pod onto nodes with an accelerator, which are commonly tainted with the name of its resource."""
    return Toleration(key=str(ACCELERATORS[kind].resource), operator="Exists", effect="NoSchedule")


def backend_of(device: str) -> str:
    """The process-group backend for a torch device type: CPU tensors always go through gloo."""
    if device == "cpu":
        return "gloo"
    (backend,) = {entry.backend for entry in ACCELERATORS.values() if entry.device == device}
    return f"cpu:gloo,{device}:{backend}"
