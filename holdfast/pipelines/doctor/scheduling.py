"""Checks of the scheduler that a spec names: gang scheduling, queues and priorities."""

import json
import re
from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import KUEUE_QUEUES, PYTORCHJOBS, TRAINING_OPERATOR, VOLCANO_QUEUES, Cluster
from holdfast.pipelines.doctor.findings import Finding

# Check that the training operator starts the pods of a job all together or not at all.

GANG_SCHEDULING_CHECK = "gang scheduling"
LABEL = "control-plane=kubeflow-training-operator"
OPTION = "--gang-scheduler-name=volcano"


def check_gang_scheduling(cluster: Cluster) -> Iterator[Finding]:
    """Check the gang scheduler in the operator's arguments."""
    if PYTORCHJOBS not in cluster.served:
        return
    deployments = cluster.api.read("/apis/apps/v1/deployments", labelSelector=LABEL)
    if not deployments or not deployments["items"]:
        remedy = f"install the training operator: {TRAINING_OPERATOR}"
        yield Finding(GANG_SCHEDULING_CHECK, "warn", f"no deployment carries {LABEL}", remedy)
        return
    operator = deployments["items"][0]
    container = operator["spec"]["template"]["spec"]["containers"][0]
    command_line = " ".join([*container.get("command", []), *container.get("args", [])])
    match = re.search(r"--gang-scheduler-name[= ](\S+)", command_line)
    scheduler = match[1] if match else "none"
    summary = f"{container['image']} schedules gangs with {scheduler}"
    is_needed = cluster.scheduler == "volcano" and cluster.job == "pytorchjob"
    if scheduler == "volcano" or not (is_needed or VOLCANO_QUEUES in cluster.served):
        yield Finding(GANG_SCHEDULING_CHECK, "ok", summary)
        return
    arguments = "/spec/template/spec/containers/0/args"
    has_arguments = bool(container.get("args"))
    patch = {
        "op": "add",
        "path": f"{arguments}/-" if has_arguments else arguments,
        "value": OPTION if has_arguments else [OPTION],
    }
    target = f"-n {operator['metadata']['namespace']} deployment/{operator['metadata']['name']}"
    yield Finding(
        GANG_SCHEDULING_CHECK,
        "fail" if is_needed else "warn",
        f"{summary}: half of a job may start, and wait for the other half",
        f"kubectl patch {target} --type json -p '{json.dumps([patch], separators=(',', ':'))}'",
    )


# Check that Volcano's scheduler may preempt jobs for more important ones. Its defaults do not allow that.

VOLCANO_ACTIONS_CHECK = "volcano actions"
PLACE, MAP = "volcano-system", "volcano-scheduler-configmap"


def check_volcano_actions(cluster: Cluster) -> Iterator[Finding]:
    """Check the actions in the scheduler's settings."""
    import yaml

    if VOLCANO_QUEUES not in cluster.served:
        return
    config_map = cluster.api.read(f"/api/v1/namespaces/{PLACE}/configmaps/{MAP}")
    if config_map is None:
        message = f"{PLACE} has no {MAP}: the scheduler's actions are unknown"
        yield Finding(VOLCANO_ACTIONS_CHECK, "warn", message, "look where Volcano is installed: kubectl get pods -A")
        return
    settings = yaml.safe_load(config_map["data"].get("volcano-scheduler.conf", "")) or {}
    actions = [action.strip() for action in str(settings.get("actions", "")).split(",")]
    missing = [action for action in ("preempt", "reclaim") if action not in actions]
    if not missing:
        yield Finding(VOLCANO_ACTIONS_CHECK, "ok", f"actions are {', '.join(actions)}")
        return
    message = f"actions are {', '.join(actions)}: without {' and '.join(missing)}, priorities displace nothing"
    wanted_actions = ", ".join([*(action for action in actions if action != "backfill"), *missing, "backfill"])
    yield Finding(
        VOLCANO_ACTIONS_CHECK,
        "warn",
        message,
        f'kubectl edit -n {PLACE} configmap {MAP}, and write actions: "{wanted_actions}"',
    )


# Check that the Volcano queue of a run exists and is open.

VOLCANO_QUEUE_CHECK = "volcano queue"


def check_volcano_queue(cluster: Cluster) -> Iterator[Finding]:
    """Check the spec's queue, otherwise Volcano's default; without a spec, the one of the manifests."""
    if VOLCANO_QUEUES not in cluster.served or cluster.scheduler not in ("", "volcano"):
        return
    queue_name = cluster.queue or ("default" if cluster.spec else "holdfast")
    queue = cluster.api.read(f"/apis/scheduling.volcano.sh/v1beta1/queues/{queue_name}")
    if queue is None:
        manifest = "manifests/components/volcano/queues.yaml" if queue_name in ("holdfast", "holdfast-idle") else ""
        yield cluster.absent(
            VOLCANO_QUEUE_CHECK,
            f"there is no Volcano queue {queue_name!r}",
            cluster.scheduler == "volcano",
            manifest=manifest,
            field="cluster.queue",
        )
    elif (state := queue.get("status", {}).get("state", "Open")) != "Open":
        yield Finding(
            VOLCANO_QUEUE_CHECK, "warn", f"{queue_name} is {state}", f"vcctl queue operate -a open -n {queue_name}"
        )
    else:
        yield Finding(VOLCANO_QUEUE_CHECK, "ok", f"{queue_name} is open")


# Check that the Kueue LocalQueue of a run exists and admits workloads.

KUEUE_QUEUE_CHECK = "kueue queue"


def check_kueue_queue(cluster: Cluster) -> Iterator[Finding]:
    """Check the spec's queue, otherwise that of the manifests."""
    if KUEUE_QUEUES not in cluster.served or cluster.scheduler not in ("", "kueue"):
        return
    queue_name, is_needed = cluster.queue or "holdfast", cluster.scheduler == "kueue"
    queue = cluster.api.read(f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{cluster.namespace}/localqueues/{queue_name}")
    if queue is None:
        manifest = "manifests/components/kueue/queues.yaml" if queue_name == "holdfast" else ""
        yield cluster.absent(
            KUEUE_QUEUE_CHECK,
            f"namespace {cluster.namespace} has no LocalQueue {queue_name!r}",
            is_needed,
            manifest=manifest,
            field="cluster.queue",
        )
        return
    conditions = {condition["type"]: condition for condition in queue.get("status", {}).get("conditions", [])}
    active = conditions.get("Active", {"status": "True"})
    if active["status"] != "True":
        message = f"{queue_name} admits nothing: {active.get('message', 'inactive')}"
        look = f"kubectl describe -n {cluster.namespace} localqueue {queue_name}"
        yield Finding(KUEUE_QUEUE_CHECK, "fail" if is_needed else "warn", message, look)
    else:
        yield Finding(KUEUE_QUEUE_CHECK, "ok", f"{queue_name} leads to ClusterQueue {queue['spec']['clusterQueue']}")


# Check that the priority class of a run exists. Kueue has a separate kind of priority class.

PRIORITY_CLASS_CHECK = "priority class"


def check_priority_class(cluster: Cluster) -> Iterator[Finding]:
    """Check the spec's class; with `everything`, by default that of the manifests."""
    class_name = cluster.spec.cluster.priority_class if cluster.spec else None
    if not class_name and not cluster.everything:
        return
    checked_name = class_name or "holdfast-standard"
    if cluster.scheduler == "kueue":
        path, kind = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses", "WorkloadPriorityClass"
        manifest = "manifests/components/kueue/priorities.yaml"
    else:
        path, kind = "/apis/scheduling.k8s.io/v1/priorityclasses", "PriorityClass"
        manifest = "manifests/base/priority-classes.yaml"
    if cluster.api.read(f"{path}/{checked_name}") is None:
        is_known = checked_name in ("holdfast-low", "holdfast-standard", "holdfast-high")
        yield cluster.absent(
            PRIORITY_CLASS_CHECK,
            f"there is no {kind} {checked_name!r}",
            bool(class_name),
            manifest=manifest if is_known else "",
            field="cluster.priority_class",
        )
    else:
        yield Finding(PRIORITY_CLASS_CHECK, "ok", f"{kind} {checked_name} exists")


# Check that Kueue, or node labels, define the topology levels of a spec's placement.
#
# `pod_placement` checks Volcano's.

PLACES_CHECK = "places"
TOPOLOGIES = "/apis/kueue.x-k8s.io/v1beta2/topologies"


def check_places(cluster: Cluster) -> Iterator[Finding]:
    """One finding if the spec prefers or requires a placement."""
    if cluster.spec is None or cluster.scheduler == "volcano" or cluster.spec.cluster.topology.placement == "any":
        return
    topology = cluster.spec.cluster.topology
    is_needed = topology.placement == "require"
    if cluster.scheduler == "kueue":
        topologies = (cluster.api.read(TOPOLOGIES) or {"items": []})["items"]
        levels = {level["nodeLabel"] for entry in topologies for level in entry["spec"].get("levels", [])}
        is_defined, message = (
            topology.level in levels,
            f"{len(topologies)} Topologies, with the levels {', '.join(sorted(levels)) or 'none'}",
        )
        remedy = f"add {topology.level} to a Topology of Kueue (manifests/components/kueue), or name another level"
    else:
        nodes = (cluster.api.read("/api/v1/nodes") or {"items": []})["items"]
        labelled = [node for node in nodes if topology.level in (node.get("metadata", {}).get("labels") or {})]
        is_defined, message = bool(labelled), f"{len(labelled)} of {len(nodes)} nodes carry the label {topology.level}"
        remedy = f"label the nodes, or name another cluster.topology.level: kubectl get nodes -L {topology.level}"
    yield Finding(
        PLACES_CHECK, "ok" if is_defined else "fail" if is_needed else "warn", message, "" if is_defined else remedy
    )
