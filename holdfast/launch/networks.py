"""Environment variables of collectives for each network and accelerator: one table, each line with its source.

A network that the spec names is used, or the job fails. Without these variables, NCCL silently falls back to TCP when
it finds no better device, and the run is many times slower. Nothing here tunes rings, protocols or buffers: a file of
the site does, and some of it changes bits. `cluster.resources.extended` requests the devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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


def variables(accelerator: str, network: str | None) -> dict[str, str]:
    """The variables of ranks for `network`; none without a network. The rules refuse networks that the table lacks."""
    return dict(NETWORKS[accelerator][network]) if network is not None else {}


def pod_variables(accelerator: str, network: str | None) -> dict[str, str]:
    """The same, with the rendezvous interface of a pod."""
    return {**variables(accelerator, network), **POD_INTERFACE[accelerator]} if network is not None else {}
