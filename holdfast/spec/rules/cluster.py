"""Rules of `cluster` for the job: nodes, queue, accelerator, network and placement."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from holdfast.spec.cluster import Cluster, StepPod, Steps
from holdfast.spec.errors import Problem
from holdfast.spec.rules.pods import STEP_PODS
from holdfast.spec.training import KEEPING
from holdfast.spec.tree import Spec

# The networks that the collectives of an accelerator support (holdfast.launch.accelerators sets their variables).
NETWORKS = {
    "cpu": ("ethernet",),
    "nvidia": ("ethernet", "infiniband", "roce", "efa"),
    "amd": ("ethernet", "infiniband", "roce"),
    "ascend": ("ethernet", "roce"),
    "gaudi": ("ethernet", "roce"),
}
JOB_NAMES = {"trainjob": "TrainJob", "volcano": "Volcano Job"}


def check_node_range(spec: Spec) -> Iterator[Problem]:
    """The minimum number of nodes is not above the maximum."""
    if spec.cluster.nodes.min > spec.cluster.nodes.max:
        yield Problem(
            "cluster.nodes.min",
            spec.cluster.nodes.min,
            f"is above cluster.nodes.max = {spec.cluster.nodes.max}",
            f"use at most {spec.cluster.nodes.max}",
        )


def check_straggler_removal(spec: Spec) -> Iterator[Problem]:
    """The node of a slow rank is excluded only if there are several nodes."""
    if spec.cluster.stragglers == "exclude" and spec.cluster.nodes.max == 1:
        yield Problem(
            "cluster.stragglers",
            "exclude",
            "is not possible with cluster.nodes.max = 1, because all ranks are on one node",
            "use report",
        )


def check_elastic_nodes(spec: Spec) -> Iterator[Problem]:
    """A job with a variable number of nodes allows its bits to change, and divides its batch at every size."""
    nodes, training = spec.cluster.nodes, spec.training
    if nodes.min >= nodes.max:
        return
    if training.determinism == "exact":
        yield Problem(
            "cluster.nodes.min",
            nodes.min,
            f"is below cluster.nodes.max = {nodes.max}, and a different number of nodes gives different bits",
            f"use {nodes.max}, "
            "training.determinism: elastic (the same bits at any number), or training.determinism: off",
        )
    if spec.parallel.engine == "deepspeed":
        yield Problem(
            "cluster.nodes.min",
            nodes.min,
            "is below cluster.nodes.max, and DeepSpeed fixes the number of ranks",
            f"use {nodes.max}, or parallel.strategy: fsdp",
        )
    if (kind := training.gradient_compression) in KEEPING:
        yield Problem(
            "cluster.nodes.min",
            nodes.min,
            f"is below cluster.nodes.max, and the state of {kind} is for a fixed number of ranks",
            f"use nodes.min: {nodes.max}, or training.gradient_compression: fp16, bf16 or none",
        )
    if training.determinism == "elastic" or spec.parallel.auto:
        return  # micro-batches fit any number of ranks; with auto the planner repeats this check for its layout
    parallel = spec.parallel
    sequence = parallel.tensor * parallel.context  # ranks with different tokens of the same samples
    together, dealt = sequence * parallel.pipeline, parallel.replicas * parallel.expert
    for size in range(nodes.min, nodes.max):
        groups, rest = divmod(parallel.processes * size, together)
        if rest or groups % parallel.replicas or groups * sequence % dealt:
            yield Problem(
                "cluster.nodes.min",
                nodes.min,
                f"allows {size} nodes, and the layout of `parallel` does not fit {parallel.processes * size} ranks",
                f"use {nodes.max}, or make parallel.processes a multiple of "
                f"{lcm(together * parallel.replicas, parallel.pipeline * dealt)}",
            )
            return
        if training.global_batch % (unit := training.micro_batch * groups):
            yield Problem(
                "training.global_batch",
                training.global_batch,
                f"cannot be divided over {size} nodes: it is not a multiple of {unit}",
                "choose nodes.min, nodes.max and micro_batch such that every number of nodes between them divides it",
            )
            return


def check_spares(spec: Spec) -> Iterator[Problem]:
    """Spare nodes need a gang of fixed size whose pods are replaced one by one."""
    cluster = spec.cluster
    if not cluster.spares:
        return
    if cluster.nodes.min < cluster.nodes.max:
        yield Problem(
            "cluster.spares",
            cluster.spares,
            f"is not possible in an elastic gang, because every available node trains: nodes.min = "
            f"{cluster.nodes.min} is below nodes.max = {cluster.nodes.max}",
            f"use nodes.min: {cluster.nodes.max}, or nodes.max: {cluster.nodes.max + cluster.spares} without spares",
        )
    if spec.parallel.engine == "deepspeed":
        yield Problem(
            "cluster.spares",
            cluster.spares,
            "is not tested with DeepSpeed, and not supported",
            "remove it, or use parallel.strategy: fsdp",
        )
    if cluster.job != "pytorchjob":
        yield Problem(
            "cluster.spares",
            cluster.spares,
            f"is not possible in a {JOB_NAMES[cluster.job]}, whose pods end together",
            "remove it, or use cluster.job: pytorchjob",
        )


def check_scheduler_fields(spec: Spec) -> Iterator[Problem]:
    """Fields of `cluster` that need another field are not given without it."""
    cluster = spec.cluster
    if cluster.queue is not None and cluster.scheduler == "default":
        yield Problem(
            "cluster.queue", cluster.queue, "is not used by scheduler: default", "use scheduler: volcano or kueue"
        )
    if cluster.scheduler == "kueue" and cluster.queue is None:
        yield Problem("cluster.queue", None, "is missing for scheduler: kueue", "name a LocalQueue of the namespace")
    if cluster.job == "volcano" and cluster.scheduler != "volcano":
        yield Problem(
            "cluster.scheduler",
            cluster.scheduler,
            "cannot place a Volcano Job",
            "use volcano, or cluster.job: pytorchjob",
        )
    if cluster.job != "pytorchjob" and cluster.nodes.min < cluster.nodes.max:
        yield Problem(
            "cluster.nodes.min",
            cluster.nodes.min,
            f"is below cluster.nodes.max, and a {JOB_NAMES[cluster.job]} is not elastic",
            f"use {cluster.nodes.max}, or cluster.job: pytorchjob",
        )
    if cluster.slice is not None and cluster.accelerator not in ("nvidia", "amd"):
        yield Problem(
            "cluster.slice",
            cluster.slice,
            f"is not supported with cluster.accelerator: {cluster.accelerator}",
            "remove it: evaluate then runs on CPU",
        )
    places: dict[str, Cluster | Steps | StepPod] = {"": cluster, "steps": cluster.steps}
    places |= {f"steps.{name}": getattr(cluster.steps, name) for name in STEP_PODS}
    for place, section in places.items():
        for index, toleration in enumerate(section.tolerations):
            if (toleration.operator == "Equal") != (toleration.value is not None):
                yield Problem(
                    ".".join(filter(None, ("cluster", place, f"tolerations.{index}.value"))),
                    toleration.value,
                    f"is not valid with operator: {toleration.operator}",
                    "give a value for Equal, and none for Exists",
                )


def check_accelerator(spec: Spec) -> Iterator[Problem]:
    """An engine exists for the accelerator, and it supports the network."""
    cluster = spec.cluster
    if cluster.accelerator == "tpu":
        yield Problem(
            "cluster.accelerator",
            "tpu",
            "has no engine: training calls single PyTorch kernels, and a TPU needs whole graphs from XLA",
            "use nvidia, amd, ascend, gaudi or cpu",
        )
    elif cluster.network is not None and cluster.network not in NETWORKS[cluster.accelerator]:
        yield Problem(
            "cluster.network",
            cluster.network,
            f"is not supported with cluster.accelerator: {cluster.accelerator}",
            f"use {' or '.join(NETWORKS[cluster.accelerator])}, or remove it",
        )


def check_topology(spec: Spec) -> Iterator[Problem]:
    """The scheduler and the kind of job support the requested placement."""
    cluster = spec.cluster
    if cluster.topology.placement == "any":
        return
    if cluster.scheduler == "volcano" and cluster.job == "pytorchjob":
        yield Problem(
            "cluster.topology.placement",
            cluster.topology.placement,
            "has no effect in Volcano, because the operator rewrites the pod group of a PyTorchJob",
            "use cluster.job: volcano or trainjob, or cluster.scheduler: kueue",
        )
