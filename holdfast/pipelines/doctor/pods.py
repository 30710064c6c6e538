"""Checks of a run's pods: placement, quota, images and accelerators."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from holdfast.launch.accelerators import ACCELERATORS, training_image
from holdfast.launch.kubernetes.client import Object
from holdfast.pipelines.doctor.admission import rank_pod
from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import Spec
from holdfast.spec.cluster import amount
from holdfast.spec.rules.training import FP8_CAPABILITY
from holdfast.steps.runner import IMAGE

# Check that the pods of a run can be placed: namespace admission, devices, HyperNodes and Kueue quota.
#
# Four checks with separate rights to read. Each runs only if the spec uses the feature.

CAPABILITIES, DEVICES, TOPOLOGY, QUOTA = "capabilities", "devices", "topology", "kueue quota"
ENFORCE = "pod-security.kubernetes.io/enforce"
HYPERNODES = "/apis/topology.volcano.sh/v1alpha1/hypernodes"


def capabilities(cluster: Cluster) -> Iterator[Finding]:
    """Check that the namespace is `privileged` if the spec adds capabilities; lower pod security levels allow none of
    them.
    """
    names = ", ".join(cluster.spec.cluster.capabilities) if cluster.spec else ""
    if not names:
        return
    namespace = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}") or {}
    level = namespace.get("metadata", {}).get("labels", {}).get(ENFORCE, "privileged")
    if level == "privileged":
        yield Finding(CAPABILITIES, "ok", f"{cluster.namespace} admits pods with {names}")
        return
    message = f"{cluster.namespace} enforces the pod security standard {level}, which refuses pods with {names}"
    remedy = (
        "remove cluster.capabilities (they have no effect for a process that is not root) and raise LimitMEMLOCK of "
        f"the nodes' container runtime, or let the namespace enforce privileged: docs/placement.md ({ENFORCE})"
    )
    yield Finding(CAPABILITIES, "fail", message, remedy)


def devices(cluster: Cluster) -> Iterator[Finding]:
    """Check that some node has enough of every extended resource that a pod of the job requests."""
    resources = _extended(cluster.spec) if cluster.spec else {}
    if not resources:
        return
    nodes = (cluster.api.read("/api/v1/nodes") or {}).get("items", [])
    for name, count in resources.items():
        largest = max((_allocatable(node, name) for node in nodes), default=0)
        if largest >= amount(count):
            yield Finding(DEVICES, "ok", f"nodes have up to {largest} of {name}, each pod takes {count}")
        else:
            message = f"no node has {count} of {name}: the most is {largest}"
            remedy = f"install its device plugin, ask for less, or wait for a node: kubectl get nodes -o wide ({name})"
            yield Finding(DEVICES, "warn", message, remedy)  # an autoscaler may add one


def hypernodes(cluster: Cluster) -> Iterator[Finding]:
    """Check that Volcano has HyperNodes for the spec's placement."""
    if cluster.spec is None or cluster.scheduler != "volcano":
        return
    topology = cluster.spec.cluster.topology
    if topology.placement == "any":
        return
    items = (cluster.api.read(HYPERNODES) or {}).get("items", [])
    tiers = sorted({int(item["spec"]["tier"]) for item in items})
    if tiers and tiers[0] <= topology.tier:
        yield Finding(TOPOLOGY, "ok", f"there are {len(items)} HyperNodes of the tiers {tiers}")
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
    covered = {resource for group in queue["spec"].get("resourceGroups", []) for resource in group["coveredResources"]}
    missing = sorted({"cpu", "memory", *_extended(cluster.spec)} - covered)
    if missing:
        remedy = f"add them to coveredResources and to each flavor of ClusterQueue {name}"
        yield Finding(QUOTA, "fail", f"ClusterQueue {name} has no quota of {', '.join(missing)}", remedy)
    else:
        yield Finding(QUOTA, "ok", f"ClusterQueue {name} has a quota of everything that the pods ask for")


def _extended(spec: Spec) -> dict[str, str]:
    accelerator = ACCELERATORS[spec.cluster.accelerator].resource
    requests = {accelerator: str(spec.parallel.processes)} if accelerator else {}
    return requests | dict(spec.cluster.resources.extended)


def _allocatable(node: Object, resource: str) -> int:
    return int(amount(str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))))


# Check that the namespace's quotas allow the whole gang: a pod that quota refuses never becomes visible.

QUOTA_CHECK = "quota"


def check_quota(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each quota that is too small for all ranks together."""
    if cluster.spec is None:
        return
    settings = cluster.spec.cluster
    totals = _wanted(rank_pod(cluster.spec), settings.nodes.min + settings.spares)
    quotas = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/resourcequotas") or {"items": []}
    is_short = False
    for quota in quotas["items"]:
        hard, used = quota.get("spec", {}).get("hard", {}), quota.get("status", {}).get("used", {})
        for resource, needed in totals.items():
            if resource not in hard or needed <= amount(str(hard[resource])) - amount(str(used.get(resource, "0"))):
                continue
            is_short = True
            exceeds_limit = needed > amount(str(hard[resource]))
            message = (
                f"{quota['metadata']['name']} allows {hard[resource]} of {resource}, {used.get(resource, '0')} of it "
                f"are in use, and the ranks ask for {_text(needed)}"
            )
            remedy = f"kubectl edit -n {cluster.namespace} resourcequota {quota['metadata']['name']}, or ask for less"
            yield Finding(QUOTA_CHECK, "fail" if exceeds_limit else "warn", message, remedy)
    if not is_short:
        yield Finding(
            QUOTA_CHECK, "ok", f"{len(quotas['items'])} quotas in {cluster.namespace}, with room for the ranks"
        )


def _wanted(pod: dict[str, Any], nodes: int) -> dict[str, Decimal]:
    """The total requests of the ranks, by the names in quotas."""
    totals = {"pods": Decimal(nodes)}
    for kind in ("requests", "limits"):
        for name, value in pod["spec"]["containers"][0]["resources"].get(kind, {}).items():
            totals[f"{kind}.{name}"] = amount(str(value)) * nodes
            if kind == "requests" and name in ("cpu", "memory"):
                totals[name] = totals[f"{kind}.{name}"]
    return totals


def _text(value: Decimal) -> str:
    return f"{value:f}" if value < 2**20 else f"{value / 2**30:.1f}Gi"


# Check that every node can pull the images of a run, and that the pull Secrets exist.

IMAGES_CHECK = "images"
PULL_KINDS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


def check_images(cluster: Cluster) -> Iterator[Finding]:
    """One finding for each image and for each pull secret."""
    if cluster.spec is None:
        return
    settings = cluster.spec.cluster
    for image in dict.fromkeys([IMAGE, settings.image or training_image(settings.accelerator)]):
        registry, _, path = image.partition("/")
        tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
        if not path or not ("." in registry or ":" in registry or registry == "localhost"):
            message = f"{image} names no registry: only nodes on which it was loaded have it"
            remedy = (
                "push the images, and name them: --image for the steps, cluster.image for the ranks (docs/images.md)"
            )
            yield Finding(IMAGES_CHECK, "warn", message, remedy)
        elif "@" not in image and tag in ("", "latest"):
            yield Finding(IMAGES_CHECK, "warn", f"{image} changes under its name", "name a version, or better a digest")
        else:
            yield Finding(IMAGES_CHECK, "ok", f"{image} names a registry and a version")
    for name in settings.pull_secrets:
        secret = cluster.api.read(f"/api/v1/namespaces/{cluster.namespace}/secrets/{name}")
        if secret is None or secret.get("type") not in PULL_KINDS:
            problem = "is not there" if secret is None else f"is of type {secret.get('type')}"
            remedy = f"kubectl create secret docker-registry {name} -n {cluster.namespace} --docker-server=..."
            yield Finding(IMAGES_CHECK, "fail", f"pull secret {name} in {cluster.namespace} {problem}", remedy)


# Check that enough nodes have the accelerators that every rank of a spec requests.

ACCELERATORS_CHECK = "accelerators"


def check_accelerators(cluster: Cluster) -> Iterator[Finding]:
    """Count the nodes with the accelerators of one gang node, and check whether they support the spec's precision."""
    spec = cluster.spec
    resource = ACCELERATORS[spec.cluster.accelerator].resource if spec else None
    if spec is None or not resource:
        return
    each, nodes = spec.parallel.processes, spec.cluster.nodes.min
    all_nodes = cluster.api.read("/api/v1/nodes") or {"items": []}
    matching = [
        node
        for node in all_nodes["items"]
        if spec.cluster.node_selector.items() <= (node.get("metadata", {}).get("labels") or {}).items()
    ]
    capable = [
        node
        for node in matching
        if amount(str(node.get("status", {}).get("allocatable", {}).get(resource, "0"))) >= each
    ]
    if spec.training.precision == "fp8" and (outdated := [node for node in capable if _knows_no_fp8(node)]):
        names = ", ".join(str(node["metadata"].get("name")) for node in outdated[:3]) + (
            " …" if len(outdated) > 3 else ""
        )
        message = f"{len(outdated)} of {len(capable)} nodes that fit cluster.node_selector know no fp8 ({names})"
        remedy = "choose nodes with compute capability 8.9 or more (Ada, Hopper, Blackwell) by cluster.node_selector"
        yield Finding(ACCELERATORS_CHECK, "warn", message, f"{remedy}, or take training.precision: bf16")
    if len(capable) >= nodes:
        yield Finding(
            ACCELERATORS_CHECK,
            "ok",
            f"{len(capable)} nodes offer {each} {resource} or more; the gang begins with {nodes}",
        )
        return
    message = (
        f"{len(capable)} of {len(matching)} nodes that fit cluster.node_selector offer {each} {resource}; the gang "
        f"needs {nodes} of them"
    )
    remedy = f"install the device plugin of {resource}, add nodes, or change cluster.nodes and parallel.processes"
    yield Finding(
        ACCELERATORS_CHECK, "warn", message, f"{remedy}; a cluster that adds nodes on demand may have them later"
    )


def _knows_no_fp8(node: dict[str, Any]) -> bool:
    """Whether NVIDIA's feature discovery labels show a device without fp8; False without labels."""
    labels = node.get("metadata", {}).get("labels") or {}
    major, minor = (labels.get(f"nvidia.com/gpu.compute.{part}", "") for part in ("major", "minor"))
    return major.isdigit() and minor.isdigit() and (int(major), int(minor)) < FP8_CAPABILITY
