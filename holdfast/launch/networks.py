"""What the collectives must be told of a network, by accelerator: one table, each line with its source.

Promises that a network which was named is used or the job fails: where it finds no better device, NCCL falls back to
TCP without a word, and the run is many times slower. Nothing here tunes (rings, protocols, buffers): that is for a file
of the site, and some of it changes bits. Leaves the devices themselves to `cluster.resources.extended`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# NCCL_NET: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net. RCCL reads the same variables.
_NCCL = {
    "ethernet": {"NCCL_NET": "Socket"},
    "infiniband": {"NCCL_NET": "IB"},
    "roce": {"NCCL_NET": "IB"},  # the address to use (NCCL_IB_GID_INDEX) is found by NCCL itself since 2.21
    # Every version of the plugin answers to this name, newer ones to shorter ones too: aws/aws-ofi-nccl, pull 530.
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
        "ascend": {"ethernet": _HCCL, "roce": _HCCL},  # the accelerators have RoCE ports of their own
        "gaudi": {"ethernet": {}, "roce": {}},  # as above; HCCL finds them by itself
    }
)
# The interface of a pod's own address has this name whatever else is attached (CRI: containerd and CRI-O set it up so).
# Where a pod has more, collectives would bind to the first that they find, and each rank perhaps to another network.
POD_INTERFACE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {"GLOO_SOCKET_IFNAME": "eth0"},
        "nvidia": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        "amd": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"},
        "ascend": {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "=eth0"},
        "gaudi": {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "=eth0"},
    }
)


def variables(accelerator: str, network: str | None) -> dict[str, str]:
    """What the ranks are told of `network`; nothing when none was named. The rules refuse what the table lacks."""
    return dict(NETWORKS[accelerator][network]) if network is not None else {}


def pod_variables(accelerator: str, network: str | None) -> dict[str, str]:
    """The same, and the interface for meeting, in a pod."""
    return {**variables(accelerator, network), **POD_INTERFACE[accelerator]} if network is not None else {}
