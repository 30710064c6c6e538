"""Configuration of Kueue or Volcano for a policy: objects, and the differences of the engine.

A policy that an engine cannot express is refused by name with the reason. Every difference from the simulated policy is
reported. The functions are pure: nothing is sent. docs/simulator.md names the engines' sources.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from holdfast.simulation.cluster import ClusterModel, Job
from holdfast.spec.errors import Problem, SpecError

Engine = Literal["kueue", "volcano"]
Object = dict[str, Any]

RESOURCE = "nvidia.com/gpu"
GROUP_LABEL = "holdfast/node-group"  # of the nodes, with the group's name in the simulated cluster
NAME = "holdfast"
PRIORITY_STEP = 1000  # between two priorities of a trace
LEAST_PRIORITY, MOST_PRIORITY = -1_000_000, 1_000_000  # of a trace
HALF_LIFE = "168h"  # as in the simulated fair share
EXCLUDED = ("cpu", "memory", "ephemeral-storage")  # resources that the simulated cluster does not model

_TIME = "orders by what its owner's estimate leaves, and no engine asks for an estimate"
_SERVED = "orders by what a job has computed, which no engine counts for a job that starts again"
_NEVER: Mapping[str, str] = {
    "easy": "keeps reservations by owners' estimates, and no engine asks for an estimate",
    "conservative": "keeps reservations by owners' estimates, and no engine asks for an estimate",
    "feedback": _SERVED,
    "least-attained": _SERVED,
    "shortest": _TIME,
    "learned": _TIME,
    "value": "orders by value for an hour, and priority classes are few and fixed",
    "cheap": "waits for an hour, and no engine knows what one costs",
    "elastic": "resizes gangs that run, and neither engine resizes a PyTorchJob",
}
_REFUSED: Mapping[Engine, Mapping[str, str]] = {
    "kueue": _NEVER,
    "volcano": {
        **_NEVER,
        "fifo": "lets no job overtake, and Volcano's allocate continues with the next job where one does not fit",
        "fair-share": "remembers what was used, and Volcano's shares are of what is held now",
    },
}
_DIFFERS: Mapping[tuple[Engine, str], str] = {
    ("kueue", "fifo"): "a workload that waits for quota blocks its ClusterQueue, as here; one that was evicted goes "
    "back to the place of its creation",
    ("kueue", "backfill"): "nothing else",
    ("kueue", "priority"): "Kueue evicts the lowest priority first, and of equals the newest, not the one that loses "
    "least work",
    ("kueue", "fair-share"): "Kueue counts what was used as it is used, the simulation at the start of a job for all "
    "of its estimate",
    ("kueue", "drf"): "what a tenant holds counts immediately, as here",
    ("kueue", "topology"): "Kueue prefers one rack and does not wait for it; jobs ask with cluster.topology.placement: "
    "prefer",
    ("volcano", "backfill"): "nothing that the simulation shows",
    ("volcano", "priority"): "Volcano evicts the lowest priority first, not the one that loses least work",
    ("volcano", "drf"): "a queue is held to what the weights of those that want something give it, and takes more "
    "only of what they leave",
    ("volcano", "topology"): "Volcano prefers one HyperNode and does not wait for it; jobs ask with "
    "cluster.topology.placement: prefer, and HyperNodes are yours to describe (manifests/components/volcano-topology)",
}

# Holds for Kueue without a topology; a policy's difference follows it.
_COUNTS = (
    "Kueue counts accelerators, not whether nodes have them free together: a gang may be let in and wait for nodes; "
)

# Otherwise no gang is ever a victim, because it cannot lose a pod and stay a gang.
_OPTIONS: Mapping[str, Object] = {"gang": {"enablePreemptable": False}}


@dataclass(frozen=True)
class Configuration:
    """The configuration of an engine for a policy."""

    objects: tuple[Object, ...]  # for kubectl apply
    settings: Object | None  # of the engine's controller, if it has a separate file
    differs: str  # how the engine differs from the simulated policy


def configuration(engine: Engine, policy: str, model: ClusterModel, jobs: Sequence[Job]) -> Configuration:
    """The configuration of `engine` that is closest to `policy` on this cluster, for the tenants and priorities of
    `jobs`.

    Raises SpecError if the engine cannot express the policy, or a name is invalid on Kubernetes.
    """
    reason = _REFUSED[engine].get(policy)
    if policy == "drf" and len(model.groups) > 1:
        reason = (
            "holds shares of each group of nodes apart, and the engines add up what a tenant has of one resource in "
            "all groups"
        )
    if reason is not None:
        supported = ", ".join(name for engine_name, name in _DIFFERS if engine_name == engine)
        raise SpecError(
            [Problem("--policy", policy, f"cannot be expressed to {engine}: it {reason}", f"use {supported}")], engine
        )
    tenants = _named("tenant", (job.tenant for job in jobs))
    groups = _named("groups.name", (group.name for group in model.groups))
    priorities = sorted({job.priority for job in jobs})
    if priorities and not LEAST_PRIORITY <= priorities[0] <= priorities[-1] <= MOST_PRIORITY:
        remedy = f"use numbers from {LEAST_PRIORITY} to {MOST_PRIORITY}"
        raise SpecError([Problem("priority", priorities[0], "is not one that a class can have", remedy)])
    weights = {name: model.quotas.get(tenant, 1.0) for tenant, name in tenants.items()}
    for name, weight in weights.items():
        if weight <= 0 and policy in ("fair-share", "drf"):
            raise SpecError([Problem(f"quotas.{name}", weight, "is no share of a cluster", "use a number above 0")])
    build = _kueue if engine == "kueue" else _volcano
    objects, settings = build(policy, model, groups, weights, priorities)
    differs = _DIFFERS[engine, policy]
    return Configuration(
        tuple(objects), settings, _COUNTS + differs if engine == "kueue" and policy != "topology" else differs
    )


def text_of(objects: Iterable[Object], comment: str) -> str:
    """YAML documents with a leading comment."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + yaml.safe_dump_all(objects, sort_keys=False, width=120)


def _kueue(
    policy: str, model: ClusterModel, groups: Mapping[str, str], weights: Mapping[str, float], priorities: Sequence[int]
) -> tuple[list[Object], Object]:
    api = "kueue.x-k8s.io/v1beta2"
    topology = policy == "topology"
    objects: list[Object] = []
    if topology:
        levels = [{"nodeLabel": "topology.kubernetes.io/rack"}, {"nodeLabel": "kubernetes.io/hostname"}]
        objects.append(_object(api, "Topology", NAME, {"levels": levels}))
    for group in model.groups:
        flavor: Object = {
            "nodeLabels": {GROUP_LABEL: groups[group.name]},
            "tolerations": [{"key": RESOURCE, "operator": "Exists", "effect": "NoSchedule"}],
        }
        objects.append(
            _object(api, "ResourceFlavor", groups[group.name], flavor | ({"topologyName": NAME} if topology else {}))
        )

    def quota(whole: bool) -> list[Object]:
        flavors = [
            {
                "name": groups[group.name],
                "resources": [{"name": RESOURCE, "nominalQuota": str(group.nodes * group.gpus if whole else 0)}],
            }
            for group in model.groups
        ]
        return [{"coveredResources": [RESOURCE], "flavors": flavors}]

    queue: Object = {
        "namespaceSelector": {},
        "queueingStrategy": "StrictFIFO" if policy == "fifo" else "BestEffortFIFO",
        "preemption": {
            "withinClusterQueue": "LowerPriority" if policy == "priority" else "Never",
            "reclaimWithinCohort": "Never",
        },
    }
    own = policy == "drf"  # a separate ClusterQueue for each tenant, which borrows everything
    if own:
        objects.append(_object(api, "Cohort", NAME, {"resourceGroups": quota(whole=True)}))
        for name, weight in weights.items():
            fair = {"cohortName": NAME, "fairSharing": {"weight": _quantity(weight)}}
            objects.append(_object(api, "ClusterQueue", name, {**fair, **queue, "resourceGroups": quota(whole=False)}))
    else:
        scope = {"admissionScope": {"admissionMode": "UsageBasedAdmissionFairSharing"}}
        more = scope if policy == "fair-share" else {}
        objects.append(_object(api, "ClusterQueue", NAME, {**queue, **more, "resourceGroups": quota(whole=True)}))
    for name, weight in weights.items():
        local: Object = {"clusterQueue": name if own else NAME}
        if policy == "fair-share":
            local["fairSharing"] = {"weight": _quantity(weight)}
        objects.append(_object(api, "LocalQueue", name, local))
    if policy == "priority":
        objects += [
            {**_object(api, "WorkloadPriorityClass", _class(value)), "value": PRIORITY_STEP * value}
            for value in priorities
        ]
    settings: Object = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "resources": {"excludeResourcePrefixes": list(EXCLUDED)},
    }
    if policy == "drf":
        settings["fairSharing"] = {"preemptionStrategies": ["LessThanOrEqualToFinalShare"]}
    if policy == "fair-share":
        settings["admissionFairSharing"] = {
            "usageHalfLifeTime": HALF_LIFE,
            "usageSamplingInterval": "5m",
            "resourceWeights": {RESOURCE: 1.0},
        }
    return objects, settings


def _volcano(
    policy: str,
    model: ClusterModel,  # noqa: ARG001 - Volcano looks at the nodes themselves
    groups: Mapping[str, str],  # noqa: ARG001
    weights: Mapping[str, float],
    priorities: Sequence[int],
) -> tuple[list[Object], None]:
    api = "scheduling.volcano.sh/v1beta1"
    ordered = policy == "priority"
    tiers: list[list[str]] = [
        [*(["priority"] if ordered else []), "gang", "conformance"],
        [
            *(["proportion"] if policy == "drf" else []),
            "predicates",
            "nodeorder",
            "binpack",
            *(["network-topology-aware"] if policy == "topology" else []),
        ],
    ]
    scheduler = {
        "actions": "enqueue, allocate, preempt, backfill" if ordered else "enqueue, allocate, backfill",
        "tiers": [{"plugins": [{"name": name, **_OPTIONS.get(name, {})} for name in names]} for names in tiers],
    }
    data = {"volcano-scheduler.conf": yaml.safe_dump(scheduler, sort_keys=False)}
    metadata = {"name": "volcano-scheduler-configmap", "namespace": "volcano-system"}
    objects: list[Object] = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}]
    if policy == "drf":
        scale = 1 / min(weights.values())  # weights are whole numbers
        for name, weight in weights.items():
            objects.append(_object(api, "Queue", name, {"weight": max(1, round(weight * scale)), "reclaimable": False}))
    else:
        objects.append(_object(api, "Queue", NAME, {"weight": 1, "reclaimable": False}))
    if ordered:
        objects += [
            {
                **_object("scheduling.k8s.io/v1", "PriorityClass", _class(value)),
                "value": PRIORITY_STEP * value,
                "preemptionPolicy": "PreemptLowerPriority",
            }
            for value in priorities
        ]
    return objects, None


def _object(api: str, kind: str, name: str, spec: Object | None = None) -> Object:
    obj: Object = {"apiVersion": api, "kind": kind, "metadata": {"name": name}}
    return obj if spec is None else {**obj, "spec": spec}


def _class(priority: int) -> str:
    return f"{NAME}-{'minus-' if priority < 0 else ''}{abs(priority)}"


def _quantity(weight: float) -> str:
    """A weight as a Kubernetes quantity, to a thousandth."""
    return f"{max(1, round(1000 * weight))}m"


def _named(field: str, names: Iterable[str]) -> dict[str, str]:
    """Kubernetes names by the names in the trace or cluster. Raises SpecError."""
    by_name: dict[str, str] = {}
    for name in sorted(set(names)):
        kubernetes_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        if not kubernetes_name or len(kubernetes_name) > 63 or kubernetes_name in by_name.values():
            raise SpecError(
                [Problem(field, name, "makes no name of a queue that is its own", "use letters, digits and dashes")]
            )
        by_name[name] = kubernetes_name
    return by_name
