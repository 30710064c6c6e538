"""Table of accelerators: their names in Kubernetes, Slurm, containers and torch.

Emitters and the trainer read the same table. The trainer imports torch; this module does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType

from holdfast.spec.cluster import Toleration

# The suffix that NVIDIA's device plugin adds to a resource that it shares by time or MPS (`renameByDefault`).
SHARED = "shared"


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator."""

    device: str  # torch's device type
    backend: str  # torch's collective backend on that device
    resource: str | None = None  # Kubernetes extended resource; one for each process
    gres: str | None = None  # Slurm generic resource
    modules: tuple[str, ...] = ()  # modules to import before torch knows the device and its backend
    environment: Mapping[str, str] = field(default_factory=dict)
    slices: str | None = None  # resource of a share of an accelerator, with `{}` for the share's name


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "cpu": Accelerator(
            "cpu",
            "gloo",
            # glibc returns large blocks to the kernel at every free, and the next step pays for every page again: an
            # eighth of the time of the quickstart's steps (benchmarks/allocator.py).
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
            environment={"HCCL_DETERMINISTIC": "true"},  # otherwise the order of sums differs between runs
        ),
        "gaudi": Accelerator(
            "hpu",
            "hccl",
            "habana.ai/gaudi",
            "gaudi",
            modules=("habana_frameworks.torch.core", "habana_frameworks.torch.distributed.hccl"),
            environment={"PT_HPU_LAZY_MODE": "0"},  # FSDP2 and torch.compile need the eager mode
        ),
        # For the emitters. The rules refuse to train on it, because no engine supports XLA.
        "tpu": Accelerator("xla", "xla", "google.com/tpu", "tpu", modules=("torch_xla",)),
    }
)


def training_image(kind: str) -> str:
    """The default image of the training job for a kind of accelerator."""
    return f"holdfast-train-{kind}:{version('holdfast')}"


def ray_image(kind: str) -> str:
    """The default image of Ray nodes, each of which runs every step."""
    return f"holdfast-ray-{kind}:{version('holdfast')}"


def slice_resource(kind: str, name: str) -> str:
    """The Kubernetes resource of a share of an accelerator: `nvidia.com/mig-1g.10gb`, or `nvidia.com/gpu.shared`."""
    found = ACCELERATORS[kind]
    assert found.slices is not None, f"the rules refuse slices of {kind}"
    return f"{found.resource}.{SHARED}" if name == SHARED else found.slices.format(name)


def taint_of(kind: str) -> Toleration:
    """The toleration for nodes with an accelerator, which commonly have a taint with the name of its resource."""
    return Toleration(key=str(ACCELERATORS[kind].resource), operator="Exists", effect="NoSchedule")


def backend_of(device: str) -> str:
    """The process-group backend for a torch device type. CPU tensors always use gloo."""
    if device == "cpu":
        return "gloo"
    (backend,) = {entry.backend for entry in ACCELERATORS.values() if entry.device == device}
    return f"cpu:gloo,{device}:{backend}"
