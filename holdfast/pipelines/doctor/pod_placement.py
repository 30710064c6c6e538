"""Check that the pods of a run can be placed: namespace admission, devices, HyperNodes and Kueue quota.

Four checks with separate rights to read. Each runs only if the spec uses the feature.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.kubernetes.client import Object
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import Spec
from holdfast.spec.cluster import amount

CAPABILITIES, DEVICES, TOPOLOGY, QUOTA = "capabilities", "devices", "topology", "kueue quota"
ENFORCE = "pod-security.kubernetes.io/enforce"
HYPERNODES = "/apis/topology.volcano.sh/v1alpha1/hypernodes"


def capabilities(cluster: Cluster) -> Iterator[Finding]:
    """Check that the namespace is `privileged` if the spec adds capabilities; lower pod security levels allow none of
    them.
    """
    asked = ", ".join(cluster.spec.cluster.capabilities) if cluster.spec else ""
    if not asked:
        return
    namespace = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}") or {}
    level = namespace.get("metadata", {}).get("labels", {}).get(ENFORCE, "privileged")
    if level == "privileged":
        yield Finding(CAPABILITIES, "ok", f"{cluster.namespace} admits pods with {asked}")
        return
    message = f"{cluster.namespace} enforces the pod security standard {level}, which refuses pods with {asked}"
    remedy = (
        "remove cluster.capabilities (they have no effect for a process that is not root) and raise LimitMEMLOCK of "
        f"the nodes' container runtime, or let the namespace enforce privileged: docs/placement.md ({ENFORCE})"
    )
    yield Finding(CAPABILITIES, "fail", message, remedy)


def devices(cluster: Cluster) -> Iterator[Finding]:
    """Check that some node has enough of every extended resource that a pod of the job requests."""
    asked = _extended(cluster.spec) if cluster.spec else {}
    if not asked:
        return
    nodes = (cluster.api.read("/api/v1/nodes") or {}).get("items", [])
    for name, count in asked.items():
        most = max((_allocatable(node, name) for node in nodes), default=0)
        if most >= amount(count):
            yield Finding(DEVICES, "ok", f"nodes have up to {most} of {name}, each pod takes {count}")
        else:
            message = f"no node has {count} of {name}: the most is {most}"
            remedy = f"install its device plugin, ask for less, or wait for a node: kubectl get nodes -o wide ({name})"
            yield Finding(DEVICES, "warn", message, remedy)  # an autoscaler may add one


def hypernodes(cluster: Cluster) -> Iterator[Finding]:
    """Check that Volcano has HyperNodes for the spec's placement."""
    if cluster.spec is None or cluster.scheduler != "volcano":
        return
    topology = cluster.spec.cluster.topology
    if topology.placement == "any":
        return
    found = (cluster.api.read(HYPERNODES) or {}).get("items", [])
    tiers = sorted({int(one["spec"]["tier"]) for one in found})
    if tiers and tiers[0] <= topology.tier:
        yield Finding(TOPOLOGY, "ok", f"there are {len(found)} HyperNodes of the tiers {tiers}")
        return
    message = (
        f"no HyperNode has a tier of at most {topology.tier}: the tiers are {tiers}"
        if tiers
        else "there are no HyperNodes, so Volcano knows no neighbours"
    )
    remedy = "describe the racks: manifests/components/volcano-topology is an example"
    yield Finding(TOPOLOGY, "fail" if topology.placement == "require" else "warn", message, remedy)


def quota(cluster: Cluster) -> Iterator[Finding]:
    """Check that the ClusterQueue covers all resources of the job; Kueue never admits a job with others."""
    if cluster.spec is None or cluster.scheduler != "kueue":
        return
    root = "/apis/kueue.x-k8s.io/v1beta2"
    local = cluster.api.read(f"{root}/namespaces/{cluster.namespace}/localqueues/{cluster.queue}")
    if local is None:  # another check reports it
        return
    name = local["spec"]["clusterQueue"]
    queue = cluster.api.read(f"{root}/clusterqueues/{name}")
    if queue is None:
        yield Finding(QUOTA, "fail", f"there is no ClusterQueue {name}", "name another LocalQueue, or create it")
        return
    covered = {one for group in queue["spec"].get("resourceGroups", []) for one in group["coveredResources"]}
    missing = sorted({"cpu", "memory", *_extended(cluster.spec)} - covered)
    if missing:
        remedy = f"add them to coveredResources and to each flavor of ClusterQueue {name}"
        yield Finding(QUOTA, "fail", f"ClusterQueue {name} has no quota of {', '.join(missing)}", remedy)
    else:
        yield Finding(QUOTA, "ok", f"ClusterQueue {name} has a quota of everything that the pods ask for")


def _extended(spec: Spec) -> dict[str, str]:
    accelerator = ACCELERATORS[spec.cluster.accelerator].resource
    own = {accelerator: str(spec.parallel.processes)} if accelerator else {}
    return own | dict(spec.cluster.resources.extended)


def _allocatable(node: Object, resource: str) -> int:
    return int(amount(str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))))
