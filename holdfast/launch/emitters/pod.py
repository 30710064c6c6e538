"""Parts of every training pod, in any job object: container, mounts, rights and placement.

The pod runs under the restricted Pod Security Standard: not root, nothing writable except its own volumes, no
capability, no API token. Restarts are left to the launcher: a pod never restarts itself.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from holdfast.launch.accelerators import (
    ACCELERATORS,
    network_variables,
    pod_network_variables,
    taint_of,
    training_image,
)
from holdfast.launch.exits import FILE_VARIABLE
from holdfast.launch.interface import LEAVE_MARGIN, Job, changes_members, pods_of
from holdfast.runtime import sealing
from holdfast.runtime.environment import CACHE_VARIABLE, IMAGE_VARIABLE, cache_gib
from holdfast.runtime.secrets import NOT_FOR_RANKS, SITE_KEYS_OF_RANKS
from holdfast.spec.cluster import SECRETS, Cluster
from holdfast.spec.engine_text import double_dollars
from holdfast.spec.errors import Problem, SpecError

METRICS_PORT = "metrics"  # port name of the pods, for a PodMonitor
RUN_LABEL, LAUNCH_LABEL = "holdfast/run-id", "holdfast/launch"
HEALTH_LABEL, FAILED = "holdfast/health", "failed"  # of nodes
# Which of a job's pods serve metrics: `first`, which has rank 0; or `any`, where nodes join in any order.
METRICS_LABEL = "holdfast/metrics"
USER = 1000  # user of the images; a number, so that containers which others add are not root either
SCRATCH = "/scratch"
# Ranks connect by address and port, and a pod ends with its container. A sidecar proxy of Istio breaks both. Old
# releases read the annotation, new ones the label.
NO_SIDECAR = {"sidecar.istio.io/inject": "false"}
# Moving a rank to free a node costs its gang a restart, so the cluster autoscaler and Karpenter must not evict it.
STAYS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
TERMINATION_LOG = "/dev/termination-log"  # its content becomes the container's termination message

# Environment variables of pods from the downward API, for ranks and for the steps of every backend.
POD_FIELDS = {
    "HOLDFAST_POD_NAME": "metadata.name",
    "HOLDFAST_POD_NAMESPACE": "metadata.namespace",
    "HOLDFAST_POD_UID": "metadata.uid",
    "HOLDFAST_NODE_NAME": "spec.nodeName",
}

Owner = Mapping[str, Any]  # an ownerReference
KEY = "key"  # in the Secret of a launch


def labels(job: Job) -> dict[str, str]:
    """The labels of the job's objects and pods."""
    return {
        **job.cluster.labels,
        "app.kubernetes.io/name": "holdfast",
        "app.kubernetes.io/component": "train",
        "app.kubernetes.io/managed-by": "holdfast",
        RUN_LABEL: job.run_id,
        LAUNCH_LABEL: str(job.launch),
    }


def has_key(job: Job) -> bool:
    """Whether the job's nodes authenticate each other by a key: a single node needs none."""
    return pods_of(job.cluster) > 1


def key_name(job: Job) -> str:
    """The name of the Secret that holds the key of the launch."""
    return f"{job.name}-key"


def key_secret(job: Job, owner: Owner) -> dict[str, Any]:
    """A Secret with a new key for the launch. It is deleted with its owner, the job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata(job, owner), "name": key_name(job)},
        "immutable": True,
        "stringData": {KEY: sealing.new_key()},
    }


def _key_variable(job: Job) -> list[dict[str, Any]]:
    if not has_key(job):
        return []
    reference = {"name": key_name(job), "key": KEY}
    return [{"name": sealing.VARIABLE, "valueFrom": {"secretKeyRef": reference}}]


def kueue_labels(job: Job) -> dict[str, str]:
    """The labels by which Kueue admits an object."""
    cluster = job.cluster
    if cluster.scheduler != "kueue":
        return {}
    all_labels = {"kueue.x-k8s.io/queue-name": cluster.queue, "kueue.x-k8s.io/priority-class": cluster.priority_class}
    return {key: value for key, value in all_labels.items() if value is not None}


def metadata(job: Job, owner: Owner | None, more: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The metadata of an object of the job. With `owner`, it is deleted with its owner."""
    fields: dict[str, Any] = {"name": job.name, "labels": {**labels(job), **(more or {})}}
    if job.cluster.annotations:
        fields["annotations"] = dict(job.cluster.annotations)
    if job.cluster.namespace:
        fields["namespace"] = job.cluster.namespace
    if owner is not None:
        fields["ownerReferences"] = [dict(owner)]
    return fields


def command(job: Job, *flags: str, restarts: int = 0) -> list[str]:
    """The command of a node: torchrun with `flags`, and the ranks' command.

    `restarts`: how often a node of an elastic gang may lose peers and continue. Otherwise only the launcher restarts.
    The kubelet expands variables only in `flags`.
    """
    torchrun = ["python", "-m", "holdfast.launch.torchrun", f"--max-restarts={restarts}"]
    return [
        *torchrun,
        "--monitor-interval=0.1",
        f"--shutdown-timeout={max(1, int(job.grace_seconds))}",
        *flags,
        *map(double_dollars, job.command),
    ]


def image(job: Job) -> str:
    """The image of the job."""
    return job.cluster.image or training_image(job.cluster.accelerator)


def environment(job: Job) -> dict[str, str]:
    """The variables of every rank. Those of the spec override those of the accelerator."""
    return {
        **ACCELERATORS[job.cluster.accelerator].environment,
        **network_variables(job.cluster.accelerator, job.cluster.network),
        **job.cluster.environment,
        **job.environment,
        "OMP_NUM_THREADS": str(job.threads),
    }


def sources(cluster: Cluster) -> list[dict[str, Any]]:
    """The `envFrom` entries of a container; of two variables with one name, the last one counts. The site's settings
    and Secret are optional: a step that needs a missing value reports it."""
    settings = [{"configMapRef": {"name": cluster.settings, "optional": True}}] if cluster.settings else []
    optional = {"optional": True}
    return [
        *settings,
        *({"secretRef": {"name": name} | (optional if name == SECRETS else {})} for name in cluster.secrets),
    ]


def rank_sources(cluster: Cluster) -> list[dict[str, Any]]:
    """The `envFrom` entries of a rank: all but the site's Secret, of which a rank gets only the keys of `site_keys`."""
    return [source for source in sources(cluster) if source.get("secretRef", {}).get("name") != SECRETS]


def site_keys(cluster: Cluster, variables: Container[str] = ()) -> list[dict[str, Any]]:
    """The variables that a rank gets from the site's Secret, each by its name. Leaves out those in `variables`."""
    if SECRETS not in cluster.secrets:
        return []
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRETS, "key": name, "optional": True}}}
        for name in SITE_KEYS_OF_RANKS
        if name not in variables
    ]


def withheld(variables: Container[str] = ()) -> list[dict[str, Any]]:
    """Empty variables for a rank's container, which override those of its sources: ranks get none of the secrets that
    only steps need. Leaves out those in `variables`."""
    return [{"name": name, "value": ""} for name in sorted(NOT_FOR_RANKS) if name not in variables]


def resources(job: Job) -> dict[str, dict[str, Any]]:
    """The resources of a node's pod. Only cores are overcommitted: the pod may use idle ones."""
    cluster = job.cluster
    demand = cluster.resources
    limits: dict[str, Any] = {"memory": demand.memory, **demand.extended}
    if cluster.scheduler != "kueue":  # Kueue refuses a job with a resource for which its queue has no quota
        limits["ephemeral-storage"] = demand.ephemeral_storage
    if resource := ACCELERATORS[cluster.accelerator].resource:
        limits[resource] = job.processes
    requests = {"cpu": demand.cpu, **limits}
    if cluster.topology.numa != "any":  # the kubelet binds only pods whose limits equal their requests
        limits = requests
    return {"requests": requests, "limits": limits}


def pod_template(job: Job, container: str, argv: Sequence[str]) -> dict[str, Any]:
    """A pod template with one container, named `container`, that runs `argv`."""
    _check_store(job)
    annotations = {**NO_SIDECAR, **STAYS, **job.cluster.annotations, **_kueue_topology(job)}
    meta = {"labels": {**NO_SIDECAR, **labels(job), **_metrics_label(job)}, "annotations": annotations}
    return {"metadata": meta, "spec": _pod(job, container, argv)}


def _metrics_label(job: Job) -> dict[str, str]:
    if job.metrics_port is None:
        return {}
    return {METRICS_LABEL: "any" if changes_members(job.cluster) else "first"}


def _pod(job: Job, container: str, argv: Sequence[str]) -> dict[str, Any]:
    cluster = job.cluster
    volumes, mounts = _volumes(job)
    settings = {CACHE_VARIABLE: cache_gib(cluster.resources.ephemeral_storage)}
    settings |= pod_network_variables(cluster.accelerator, cluster.network)
    variables = (
        settings
        | environment(job)
        | {
            "HOME": SCRATCH,
            "HOLDFAST_HOME": f"{SCRATCH}/holdfast",
            IMAGE_VARIABLE: image(job),
            FILE_VARIABLE: TERMINATION_LOG,
        }
    )
    training: dict[str, Any] = {
        "name": container,
        "image": image(job),
        "command": list(argv),
        "envFrom": rank_sources(cluster),
        "env": [
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in POD_FIELDS.items()),
            *_key_variable(job),
            *withheld(variables),
            *site_keys(cluster, variables),
            *({"name": name, "value": double_dollars(value)} for name, value in sorted(variables.items())),
        ],
        "resources": resources(job),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **({"add": list(cluster.capabilities)} if cluster.capabilities else {})},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if job.metrics_port is not None:
        training["ports"] = [{"name": METRICS_PORT, "containerPort": job.metrics_port}]
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
    """The pod's volumes and mounts. A claim that is mounted twice is one volume."""
    memory = {"medium": "Memory", "sizeLimit": job.cluster.resources.shared_memory}
    volumes: list[dict[str, Any]] = [
        {"name": "shared-memory", "emptyDir": memory},
        {"name": "scratch", "emptyDir": {"sizeLimit": job.cluster.resources.ephemeral_storage}},
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
    """The tolerations of the spec and of the accelerator, whose nodes commonly have a taint with its name."""
    tolerations = list(job.cluster.tolerations)
    if ACCELERATORS[job.cluster.accelerator].resource:
        tolerations.append(taint_of(job.cluster.accelerator))
    return [toleration.model_dump(exclude_none=True) for toleration in tolerations]


def _other_than(nodes: frozenset[str]) -> dict[str, Any]:
    return {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": sorted(nodes)}


def _affinity(job: Job) -> dict[str, Any]:
    """The affinity of pods. Every scheduler avoids bad nodes. Volcano and Kueue place pods close together
    themselves."""
    affinity: dict[str, Any] = {}
    nodes: dict[str, Any] = {}
    avoided = [_other_than(job.excluded_nodes)] if job.excluded_nodes else []
    if job.cluster.health.on_failure == "label":
        avoided.append({"key": HEALTH_LABEL, "operator": "NotIn", "values": [FAILED]})  # also matches without the label
    if avoided:
        terms = [{"matchExpressions": avoided}]
        nodes["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if job.leaving_nodes:
        rather = {"weight": 100, "preference": {"matchExpressions": [_other_than(job.leaving_nodes)]}}
        nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [rather]
    if nodes:
        affinity["nodeAffinity"] = nodes
    topology = job.cluster.topology
    gang = {RUN_LABEL: job.run_id, LAUNCH_LABEL: str(job.launch)}
    placed = job.cluster.scheduler == "kueue" and topology.placement != "any"  # Kueue then selects the nodes
    if pods_of(job.cluster) > 1 and not placed:  # with enough machines, each pod has a machine's network and disk
        apart = {"labelSelector": {"matchLabels": gang}, "topologyKey": "kubernetes.io/hostname"}
        wish = {"weight": 50, "podAffinityTerm": apart}
        affinity["podAntiAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}
    if job.cluster.scheduler == "default":
        near: dict[str, Any] = {"labelSelector": {"matchLabels": gang}, "topologyKey": topology.level}
        pack = {
            "labelSelector": {"matchLabels": {key: labels(job)[key] for key in list(labels(job))[:2]}},
            "topologyKey": "kubernetes.io/hostname",
        }
        wishes = [{"weight": 10, "podAffinityTerm": pack}]  # fill used nodes before empty ones
        if topology.placement == "prefer":
            wishes.insert(0, {"weight": 100, "podAffinityTerm": near})
        affinity["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": wishes}
        if topology.placement == "require":
            affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] = [near]
    return affinity


def _kueue_topology(job: Job) -> dict[str, str]:
    topology = job.cluster.topology
    if job.cluster.scheduler != "kueue" or topology.placement == "any":
        return {}
    mode = {"prefer": "preferred", "require": "required"}[topology.placement]
    return {f"kueue.x-k8s.io/podset-{mode}-topology": topology.level}


def volcano_topology(job: Job) -> dict[str, Any] | None:
    """The topology request in Volcano's terms."""
    topology = job.cluster.topology
    if topology.placement == "any":
        return None
    mode = {"prefer": "soft", "require": "hard"}[topology.placement]
    return {"mode": mode, "highestTierAllowed": topology.tier}


def _check_store(job: Job) -> None:
    """Refuse a folder store that is not on a writable volume of all pods. Raises SpecError."""
    root = job.command[list(job.command).index("--store") + 1] if "--store" in job.command else ""
    if not root.startswith("file://"):
        return
    path = root.removeprefix("file://").rstrip("/") + "/"
    folders = [volume.path.rstrip("/") + "/" for volume in job.cluster.volumes if not volume.read_only]
    if not any(path.startswith(folder) for folder in folders):
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
