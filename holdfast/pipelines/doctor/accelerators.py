"""Check that enough nodes have the accelerators that every rank of a spec requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec.cluster import amount
from holdfast.spec.rules.precision import FP8_CAPABILITY

NAME = "accelerators"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Count the nodes with the accelerators of one gang node, and check whether they support the spec's precision."""
    spec = cluster.spec
    resource = ACCELERATORS[spec.cluster.accelerator].resource if spec else None
    if spec is None or not resource:
        return
    each, nodes = spec.parallel.processes, spec.cluster.nodes.min
    listed = cluster.api.read("/api/v1/nodes") or {"items": []}
    chosen = [
        node for node in listed["items"]
        if spec.cluster.node_selector.items() <= (node.get("metadata", {}).get("labels") or {}).items()
    ]  # fmt: skip
    having = [
        node for node in chosen if amount(str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))) >= each
    ]
    if spec.training.precision == "fp8" and (old := [node for node in having if _knows_no_fp8(node)]):
        names = ", ".join(str(node["metadata"].get("name")) for node in old[:3]) + (" …" if len(old) > 3 else "")
        message = f"{len(old)} of {len(having)} nodes that fit cluster.node_selector know no fp8 ({names})"
        remedy = "choose nodes with compute capability 8.9 or more (Ada, Hopper, Blackwell) by cluster.node_selector"
        yield Finding(NAME, "warn", message, f"{remedy}, or take training.precision: bf16")
    if len(having) >= nodes:
        yield Finding(NAME, "ok", f"{len(having)} nodes offer {each} {resource} or more; the gang begins with {nodes}")
        return
    message = (
        f"{len(having)} of {len(chosen)} nodes that fit cluster.node_selector offer {each} {resource}; the gang needs "
        f"{nodes} of them"
    )
    remedy = f"install the device plugin of {resource}, add nodes, or change cluster.nodes and parallel.processes"
    yield Finding(NAME, "warn", message, f"{remedy}; a cluster that adds nodes on demand may have them later")


def _knows_no_fp8(node: dict[str, Any]) -> bool:
    """Whether NVIDIA's feature discovery labels show a device without fp8; False without labels."""
    labels = node.get("metadata", {}).get("labels") or {}
    major, minor = (labels.get(f"nvidia.com/gpu.compute.{part}", "") for part in ("major", "minor"))
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) < FP8_CAPABILITY
