"""Tables of accelerators and of their networks: names in Kubernetes, Slurm, containers and torch; variables.

Emitters and the trainer read the same table. The trainer imports torch; this module does not.
"""

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
            # glibc returns large blocks to the kernel at every free, and the next step pays for every page again. This
            # is an eighth of the time of the quickstart's steps (benchmarks/allocator.py).
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

# Environment variables of collectives for each network and accelerator, each line with its source. A network that the
# spec names is used, or the job fails. Without these variables, NCCL silently falls back to TCP when it finds no better
# device, and the run is many times slower. Nothing here tunes rings, protocols or buffers: a file of the site does, and
# some of it changes bits. `cluster.resources.extended` requests the devices.
#
# NCCL_NET: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net. RCCL reads the same variables.
_NCCL = {
    "ethernet": {"NCCL_NET": "Socket"},
    "infiniband": {"NCCL_NET": "IB"},
    "roce": {"NCCL_NET": "IB"},  # NCCL finds the address to use (NCCL_IB_GID_INDEX) since 2.21
    # Every version of the plugin answers to this name, newer ones also to shorter ones: aws/aws-ofi-nccl, pull 530.
    # FI_PROVIDER: https://github.com/aws/aws-ofi-nccl/blob/master/doc/efa-env-var.md
    "efa": {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"},
}
# The default waits 120 s for a peer's sockets, which a first compilation of kernels uses up: "HCCL_CONNECT_TIMEOUT" in
# https://www.hiascend.com/document/detail/zh/canncommercial/850/maintenref/envvar/envref_07_0149.html (120 to 7200 s)
_HCCL = {"HCCL_CONNECT_TIMEOUT": "600"}

NETWORKS: Mapping[str, Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "cpu": {"ethernet": {}},  # gloo knows TCP only
        "nvidia": _NCCL,
        "amd": {name: found for name, found in _NCCL.items() if name != "efa"},
        "ascend": {"ethernet": _HCCL, "roce": _HCCL},  # the accelerators have their own RoCE ports
        "gaudi": {"ethernet": {}, "roce": {}},  # same; HCCL finds them
    }
)
# The interface of a pod's own address always has this name (CRI: containerd and CRI-O name it so). In a pod with more
# interfaces, collectives bind to the first one they find, which may differ between ranks.
POD_INTERFACE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {"GLOO_SOCKET_IFNAME": "eth0"},
        "nvidia": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        "amd": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        "ascend": {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "=eth0"},
        "gaudi": {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "=eth0"},
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
    accelerator = ACCELERATORS[kind]
    assert accelerator.slices is not None, f"the rules refuse slices of {kind}"
    return f"{accelerator.resource}.{SHARED}" if name == SHARED else accelerator.slices.format(name)


def taint_of(kind: str) -> Toleration:
    """The toleration for nodes with an accelerator, which commonly have a taint with the name of its resource."""
    return Toleration(key=str(ACCELERATORS[kind].resource), operator="Exists", effect="NoSchedule")


def backend_of(device: str) -> str:
    """The process-group backend for a torch device type. CPU tensors always use gloo."""
    if device == "cpu":
        return "gloo"
    (backend,) = {entry.backend for entry in ACCELERATORS.values() if entry.device == device}
    return f"cpu:gloo,{device}:{backend}"


def network_variables(accelerator: str, network: str | None) -> dict[str, str]:
    """The variables of ranks for `network`; none without a network. The rules refuse networks that the table lacks."""
    return dict(NETWORKS[accelerator][network]) if network is not None else {}


def pod_network_variables(accelerator: str, network: str | None) -> dict[str, str]:
    """The same, with the rendezvous interface of a pod."""
    return {**network_variables(accelerator, network), **POD_INTERFACE[accelerator]} if network is not None else {}
