"""What every training pod has, whichever object it is part of: the container, its mounts, its rights, its placement.

Promises a pod that runs under the restricted Pod Security Standard: not root, nothing writable but its own volumes, no
capability, no API token. Leaves restarts to the launcher: a pod never comes back by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.components.launch.accelerators import ACCELERATORS, training_image
from holdfast.components.launch.ending import FILE_VARIABLE
from holdfast.components.launch.interface import Job
from holdfast.components.runtime.environment import IMAGE_VARIABLE
from holdfast.components.spec.errors import Problem, SpecError

RUN_LABEL, LAUNCH_LABEL = "holdfast/run-id", "holdfast/launch"
USER = 1000  # the user of the images; given as a number, so that containers an operator adds are not root either
LEAVE_MARGIN = 15  # seconds from the ranks' end to the pod's
SCRATCH = "/scratch"
TERMINATION_LOG = "/dev/termination-log"  # what a container leaves there is its termination message

Owner = Mapping[str, Any]  # an ownerReference


def labels(job: Job) -> dict[str, str]:
    """The labels of the job's objects and pods."""
    return {
        "app.kubernetes.io/name": "holdfast",
        "app.kubernetes.io/component": "train",
        "app.kubernetes.io/managed-by": "holdfast",
        RUN_LABEL: job.run_id,
        LAUNCH_LABEL: str(job.launch),
    }


def kueue_labels(job: Job) -> dict[str, str]:
    """The labels by which Kueue admits an object."""
    cluster = job.cluster
    if cluster.scheduler != "kueue":
        return {}
    found = {"kueue.x-k8s.io/queue-name": cluster.queue, "kueue.x-k8s.io/priority-class": cluster.priority_class}
    return {key: value for key, value in found.items() if value is not None}


def metadata(job: Job, owner: Owner | None, more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The metadata of an object of the job. With `owner` it goes when its owner goes."""
    found: dict[str, Any] = {"name": job.name, "labels": {**labels(job), **(more or {})}}
    if job.cluster.namespace:
        found["namespace"] = job.cluster.namespace
    if owner is not None:
        found["ownerReferences"] = [dict(owner)]
    return found


def command(job: Job, *flags: str) -> list[str]:
    """What the container runs: torchrun with `flags`, and the ranks' command. The launcher restarts, torchrun never."""
    torchrun = ["python", "-m", "holdfast.components.launch.torchrun", "--max-restarts=0", "--monitor-interval=0.1"]
    return [*torchrun, f"--shutdown-timeout={max(1, int(job.grace_seconds))}", *flags, *job.command]


def image(job: Job) -> str:
    """The image of the job."""
    return job.cluster.image or training_image(job.cluster.accelerator)


def environment(job: Job) -> dict[str, str]:
    """The variables of every rank; those of the accelerator give way to the spec's."""
    return {
        **ACCELERATORS[job.cluster.accelerator].environment,
        **job.cluster.environment,
        **job.environment,
        "OMP_NUM_THREADS": str(job.threads),
    }


def resources(job: Job) -> dict[str, dict[str, Any]]:
    """What a node's pod asks for. Memory and accelerators are never overcommitted; idle cores may be used."""
    cluster = job.cluster
    limits: dict[str, Any] = {"memory": cluster.resources.memory}
    if resource := ACCELERATORS[cluster.accelerator].resource:
        limits[resource] = job.processes
    return {"requests": {"cpu": cluster.resources.cpu, **limits}, "limits": limits}


def pod_template(job: Job, container: str, argv: Sequence[str], *, group: bool = False) -> dict[str, Any]:
    """A pod template whose container is called `container` and runs `argv`.

    `group`: the object has two kinds of pods, and Kueue must place them as one.
    """
    _check_store(job)
    found: dict[str, Any] = {"labels": labels(job)}
    if annotations := _kueue_topology(job, group):
        found["annotations"] = annotations
    return {"metadata": found, "spec": _pod(job, container, argv)}


def _pod(job: Job, container: str, argv: Sequence[str]) -> dict[str, Any]:
    cluster = job.cluster
    volumes, mounts = _volumes(job)
    variables = environment(job) | {
        "HOME": SCRATCH,
        "HOLDFAST_HOME": f"{SCRATCH}/holdfast",
        IMAGE_VARIABLE: image(job),
        FILE_VARIABLE: TERMINATION_LOG,
    }
    training: dict[str, Any] = {
        "name": container,
        "image": image(job),
        "command": list(argv),
        "env": [
            {"name": name, "value": value.replace("$(", "$$(")}  # else the kubelet puts another variable in
            for name, value in sorted(variables.items())
        ],
        "resources": resources(job),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if cluster.secrets:
        training["envFrom"] = [{"secretRef": {"name": name}} for name in cluster.secrets]
    pod: dict[str, Any] = {
        "containers": [training],
        "volumes": volumes,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace_seconds) + LEAVE_MARGIN,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if cluster.service_account:
        pod["serviceAccountName"] = cluster.service_account
    if cluster.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in cluster.pull_secrets]
    if cluster.scheduler == "volcano":
        pod["schedulerName"] = "volcano"
    if cluster.priority_class and cluster.scheduler != "kueue":
        pod["priorityClassName"] = cluster.priority_class
    if cluster.node_selector:
        pod["nodeSelector"] = dict(cluster.node_selector)
    if tolerations := _tolerations(job):
        pod["tolerations"] = tolerations
    if affinity := _affinity(job):
        pod["affinity"] = affinity
    return pod


def _volumes(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pod's volumes and where they are mounted. A claim that is mounted twice is one volume."""
    memory = {"medium": "Memory", "sizeLimit": job.cluster.resources.shared_memory}
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": memory},
        {"name": "scratch", "emptyDir": {}},
        {"name": "temporary", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
        {"name": "scratch", "mountPath": SCRATCH},
        {"name": "temporary", "mountPath": "/tmp"},  # noqa: S108
    ]
    names: dict[str, str] = {}
    for volume in job.cluster.volumes:
        if volume.claim not in names:
            names[volume.claim] = f"claim-{len(names)}"
            volumes.append({"name": names[volume.claim], "persistentVolumeClaim": {"claimName": volume.claim}})
        mount = {"name": names[volume.claim], "mountPath": volume.path}
        mounts.append(mount | ({"readOnly": True} if volume.read_only else {}))
    return volumes, mounts


def _tolerations(job: Job) -> list[dict[str, str]]:
    """The spec's, and that of the accelerator: nodes that have one are commonly tainted with its name."""
    found = [toleration.model_dump(exclude_none=True) for toleration in job.cluster.tolerations]
    if resource := ACCELERATORS[job.cluster.accelerator].resource:
        found.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
    return found


def _affinity(job: Job) -> dict[str, Any]:
    """Bad nodes are avoided under every scheduler; neighbourhood is left to Volcano and Kueue where they place."""
    found: dict[str, Any] = {}
    if job.excluded_nodes:
        avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(job.excluded_nodes)}
        terms = [{"matchExpressions": [avoid]}]
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    topology = job.cluster.topology
    if job.cluster.scheduler == "default":
        gang = {RUN_LABEL: job.run_id, LAUNCH_LABEL: str(job.launch)}
        near: dict[str, Any] = {"labelSelector": {"matchLabels": gang}, "topologyKey": topology.level}
        pack = {
            "labelSelector": {"matchLabels": {key: labels(job)[key] for key in list(labels(job))[:2]}},
            "topologyKey": "kubernetes.io/hostname",
        }
        wishes = [{"weight": 10, "podAffinityTerm": pack}]  # nodes in use are filled before empty ones
        if topology.placement == "prefer":
            wishes.insert(0, {"weight": 100, "podAffinityTerm": near})
        found["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": wishes}
        if topology.placement == "require":
            found["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = [near]
    return found


def _kueue_topology(job: Job, group: bool) -> dict[str, str]:
    topology = job.cluster.topology
    if job.cluster.scheduler != "kueue" or topology.placement == "any":
        return {}
    word = {"prefer": "preferred", "require": "required"}[topology.placement]
    found = {f"kueue.x-k8s.io/podset-{word}-topology": topology.level}
    return found | ({"kueue.x-k8s.io/podset-group-name": "gang"} if group else {})


def volcano_topology(job: Job) -> dict[str, Any] | None:
    """The topology wish in Volcano's words."""
    topology = job.cluster.topology
    if topology.placement == "any":
        return None
    mode = {"prefer": "soft", "require": "hard"}[topology.placement]
    return {"mode": mode, "highestTierAllowed": topology.tier}


def _check_store(job: Job) -> None:
    """A folder store is of use to pods only on a volume that they all mount."""
    root = job.command[list(job.command).index("--store") + 1] if "--store" in job.command else ""
    if not root.startswith("file://"):
        return
    path = root.removeprefix("file://").rstrip("/") + "/"
    shared = [volume.path.rstrip("/") + "/" for volume in job.cluster.volumes if not volume.read_only]
    if not any(path.startswith(folder) for folder in shared):
        raise SpecError(
            [
                Problem(
                    "store",
                    root,
                    "is a folder of one machine, and the job runs in pods",
                    "use s3://bucket/prefix, or a folder on one of cluster.volumes",
                )
            ]
        )
