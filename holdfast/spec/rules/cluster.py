"""Rules of `cluster` about the job: nodes, queue, accelerator, network and neighbourhood."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from holdfast.spec.cluster import Cluster, StepPod, Steps
from holdfast.spec.errors import Problem
from holdfast.spec.rules.pods import STEP_PODS
from holdfast.spec.training import KEEPING
from holdfast.spec.tree import Spec

# The networks whose words the collectives of an accelerator know (holdfast.launch.networks says them).
NETWORKS = {
    "cpu": ("ethernet",),
    "nvidia": ("ethernet", "infiniband", "roce", "efa"),
    "amd": ("ethernet", "infiniband", "roce"),
    "ascend": ("ethernet", "roce"),
    "gaudi": ("ethernet", "roce"),
}
JOB_NAMES = {"trainjob": "TrainJob", "volcano": "Volcano Job"}


def check_node_range(spec: Spec) -> Iterator[Problem]:
    """The smallest number of nodes is not above the largest."""
    if spec.cluster.nodes.min > spec.cluster.nodes.max:
        yield Problem(
            "cluster.nodes.min", spec.cluster.nodes.min, f"is above cluster.nodes.max = {spec.cluster.nodes.max}",
            f"use at most {spec.cluster.nodes.max}",
        )  # fmt: skip


def check_straggler_removal(spec: Spec) -> Iterator[Problem]:
    """The node of a slow rank is left out only where there are others."""
    if spec.cluster.stragglers == "exclude" and spec.cluster.nodes.max == 1:
        yield Problem(
            "cluster.stragglers", "exclude", "cannot be with cluster.nodes.max = 1: all ranks are on one node",
            "use report",
        )  # fmt: skip


def check_elastic_nodes(spec: Spec) -> Iterator[Problem]:
    """A job whose number of nodes may change says that its bits may, and divides its batch at every size."""
    nodes, training = spec.cluster.nodes, spec.training
    if nodes.min >= nodes.max:
        return
    if training.determinism == "exact":
        yield Problem(
            "cluster.nodes.min", nodes.min,
            f"is below cluster.nodes.max = {nodes.max}, and another number of nodes gives other bits",
            f"use {nodes.max}, "
            "training.determinism: elastic (the same bits at any number), or training.determinism: off",
        )  # fmt: skip
    if spec.parallel.engine == "deepspeed":
        yield Problem(
            "cluster.nodes.min", nodes.min, "is below cluster.nodes.max, and DeepSpeed fixes the number of ranks",
            f"use {nodes.max}, or parallel.strategy: fsdp",
        )  # fmt: skip
    if (kind := training.gradient_compression) in KEEPING:
        yield Problem(
            "cluster.nodes.min", nodes.min,
            f"is below cluster.nodes.max, and what {kind} keeps is each rank's: no other number of them takes it over",
            f"use nodes.min: {nodes.max}, or training.gradient_compression: fp16, bf16 or none",
        )  # fmt: skip
    if training.determinism == "elastic" or spec.parallel.auto:
        return  # any number of ranks shares the micro-batches; the planner asks again, of what it chooses
    parallel = spec.parallel
    sequence = parallel.tensor * parallel.context  # ranks that see other tokens of the same samples
    together, dealt = sequence * parallel.pipeline, parallel.replicas * parallel.expert
    for size in range(nodes.min, nodes.max):
        groups, rest = divmod(parallel.processes * size, together)
        if rest or groups % parallel.replicas or groups * sequence % dealt:
            yield Problem(
                "cluster.nodes.min", nodes.min,
                f"allows {size} nodes, whose {parallel.processes * size} ranks `parallel` cannot spread",
                f"use {nodes.max}, or make parallel.processes a multiple of "
                f"{lcm(together * parallel.replicas, parallel.pipeline * dealt)}",
            )  # fmt: skip
            return
        if training.global_batch % (unit := training.micro_batch * groups):
            yield Problem(
                "training.global_batch", training.global_batch,
                f"cannot be divided over {size} nodes: it is not a multiple of {unit}",
                "choose nodes.min, nodes.max and micro_batch so that every number of nodes between them divides it",
            )  # fmt: skip
            return


def check_spares(spec: Spec) -> Iterator[Problem]:
    """Spare nodes are for a gang of a fixed size, whose pods come back one by one."""
    cluster = spec.cluster
    if not cluster.spares:
        return
    if cluster.nodes.min < cluster.nodes.max:
        yield Problem(
            "cluster.spares", cluster.spares,
            f"cannot stand by an elastic gang, nodes.min = {cluster.nodes.min} below nodes.max = {cluster.nodes.max}, "
            "in which every node that is there trains",
            f"use nodes.min: {cluster.nodes.max}, or nodes.max: {cluster.nodes.max + cluster.spares} without spares",
        )  # fmt: skip
    if spec.parallel.engine == "deepspeed":
        yield Problem(
            "cluster.spares", cluster.spares, "have not been tried with DeepSpeed",
            "remove it, or use parallel.strategy: fsdp",
        )  # fmt: skip
    if cluster.job != "pytorchjob":
        yield Problem(
            "cluster.spares", cluster.spares, f"cannot be in a {JOB_NAMES[cluster.job]}, whose pods end together",
            "remove it, or use cluster.job: pytorchjob",
        )  # fmt: skip


def check_scheduler_fields(spec: Spec) -> Iterator[Problem]:
    """Fields of `cluster` that mean nothing without another one are not given alone."""
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
            "cluster.nodes.min", cluster.nodes.min,
            f"is below cluster.nodes.max, and a {JOB_NAMES[cluster.job]} is not elastic",
            f"use {cluster.nodes.max}, or cluster.job: pytorchjob",
        )  # fmt: skip
    if cluster.slice is not None and cluster.accelerator not in ("nvidia", "amd"):
        yield Problem(
            "cluster.slice", cluster.slice, f"does not go with cluster.accelerator: {cluster.accelerator}",
            "remove it: evaluate then runs on CPU",
        )  # fmt: skip
    places: dict[str, Cluster | Steps | StepPod] = {"": cluster, "steps": cluster.steps}
    places |= {f"steps.{name}": getattr(cluster.steps, name) for name in STEP_PODS}
    for place, section in places.items():
        for index, toleration in enumerate(section.tolerations):
            if (toleration.operator == "Equal") != (toleration.value is not None):
                yield Problem(
                    ".".join(filter(None, ("cluster", place, f"tolerations.{index}.value"))), toleration.value,
                    f"does not go with operator: {toleration.operator}", "give a value for Equal, and none for Exists",
                )  # fmt: skip


def check_accelerator(spec: Spec) -> Iterator[Problem]:
    """There is an engine for the accelerator, and it knows the network."""
    cluster = spec.cluster
    if cluster.accelerator == "tpu":
        yield Problem(
            "cluster.accelerator", "tpu",
            "has no engine: training calls PyTorch's kernels one by one, and a TPU takes whole graphs from XLA",
            "use nvidia, amd, ascend, gaudi or cpu",
        )  # fmt: skip
    elif cluster.network is not None and cluster.network not in NETWORKS[cluster.accelerator]:
        yield Problem(
            "cluster.network", cluster.network, f"is not one of cluster.accelerator: {cluster.accelerator}",
            f"use {' or '.join(NETWORKS[cluster.accelerator])}, or remove it",
        )  # fmt: skip


def check_topology(spec: Spec) -> Iterator[Problem]:
    """A wish for neighbouring nodes is one that the chosen scheduler and kind of job can keep."""
    cluster = spec.cluster
    if cluster.topology.placement == "any":
        return
    if cluster.scheduler == "volcano" and cluster.job == "pytorchjob":
        yield Problem(
            "cluster.topology.placement", cluster.topology.placement,
            "does not reach Volcano: the operator rewrites the pod group of a PyTorchJob",
            "use cluster.job: volcano or trainjob, or cluster.scheduler: kueue",
        )  # fmt: skip
