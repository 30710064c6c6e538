"""Rules of `cluster` for the job: nodes, queue, accelerator, network and placement."""

import math
from collections.abc import Iterator
from contextlib import suppress
from math import lcm

from holdfast.spec.cluster import SECRETS, Cluster, StepPod, Steps, amount
from holdfast.spec.errors import Problem
from holdfast.spec.redaction import carries_secret, names_secret
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
    group_size, copies = sequence * parallel.pipeline, parallel.replicas * parallel.expert
    for size in range(nodes.min, nodes.max):
        groups, rest = divmod(parallel.processes * size, group_size)
        if rest or groups % parallel.replicas or groups * sequence % copies:
            yield Problem(
                "cluster.nodes.min",
                nodes.min,
                f"allows {size} nodes, and the layout of `parallel` does not fit {parallel.processes * size} ranks",
                f"use {nodes.max}, or make parallel.processes a multiple of "
                f"{lcm(group_size * parallel.replicas, parallel.pipeline * copies)}",
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


# Rules of `cluster` for the pods of ranks and steps: resources, mounts, variables and metadata.

STEP_PODS = ("trigger", "divide", "tokenise", "preprocess", "train", "evaluate", "register", "notify")

# Environment variables that the launchers set, and the field to use instead.
RESERVED = {
    "OMP_NUM_THREADS": "parallel.threads",
    "HOLDFAST_ESCAPED": "the variables themselves",  # holdfast.spec.engine_text
    **dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "cluster.nodes"),
    **dict.fromkeys(
        ("HOLDFAST_LAUNCH_KEY", "HOLDFAST_NEAR_KEY", "HOLDFAST_MEETING_FILE"), "nothing: every launch has its own"
    ),
}

# Labels and annotations that Holdfast sets, and the remedy.
INJECT = "sidecar.istio.io/inject"
OURS = {
    "app.kubernetes.io/name": "remove it",
    "app.kubernetes.io/component": "remove it",
    "app.kubernetes.io/managed-by": "remove it",
    "kueue.x-k8s.io/queue-name": "use cluster.queue",
    "kueue.x-k8s.io/priority-class": "use cluster.priority_class",
    "kueue.x-k8s.io/podset-preferred-topology": "use cluster.topology",
    "kueue.x-k8s.io/podset-required-topology": "use cluster.topology",
    INJECT: "remove it: a proxy in the pod of a rank stands between that rank and its peers",
}


def check_step_pods(spec: Spec) -> Iterator[Problem]:
    """The pod of every step requests resources, and accelerators in only one way and only if they exist."""
    steps, accelerator = spec.cluster.steps, spec.cluster.accelerator
    for step in STEP_PODS:
        for name in ("cpu", "memory", "ephemeral_storage"):
            value = getattr(getattr(steps, step), name)
            if not amount(value):
                yield Problem(f"cluster.steps.{step}.{name}", value, "requests nothing", "request more than zero")
    if steps.evaluate.accelerators and (accelerator == "cpu" or spec.cluster.slice is not None):
        yield Problem(
            "cluster.steps.evaluate.accelerators",
            steps.evaluate.accelerators,
            f"is given together with cluster.slice = {spec.cluster.slice}"
            if spec.cluster.slice
            else "is not possible with cluster.accelerator: cpu",
            "keep one of the two" if spec.cluster.slice else "use 0, or name an accelerator",
        )
    if spec.schedule.max_decay is not None and steps.trigger != type(steps.trigger)():
        yield Problem(
            "cluster.steps.trigger",
            "(changed)",
            "is not used with schedule.max_decay: the trigger scores the champion, with the pod settings of evaluate",
            "use cluster.steps.evaluate",
        )


def check_resources(spec: Spec) -> Iterator[Problem]:
    """Every node requests resources, and /dev/shm, which counts as memory, fits into its memory."""
    resources = spec.cluster.resources
    if spec.cluster.topology.numa != "any" and amount(resources.cpu) % 1:
        yield Problem(
            "cluster.resources.cpu",
            resources.cpu,
            "is not a whole number of cores, which topology.numa needs",
            f"use {math.ceil(amount(resources.cpu))}",
        )
    for name, value in resources.extended.items():
        if amount(value) % 1 or not amount(value):
            yield Problem(
                f"cluster.resources.extended.{name}", value, "is not a whole number above zero", "use a whole number"
            )
    for name in ("cpu", "memory", "ephemeral_storage"):
        value = getattr(resources, name)
        if not amount(value):
            yield Problem(f"cluster.resources.{name}", value, "requests nothing", "request more than zero")
    if amount(resources.shared_memory) > amount(resources.memory):
        yield Problem(
            "cluster.resources.shared_memory",
            resources.shared_memory,
            f"is above cluster.resources.memory = {resources.memory}, which includes it",
            f"use at most {resources.memory}, or request more memory",
        )


def check_mounts(spec: Spec) -> Iterator[Problem]:
    """No two volumes have the same mount path, and none covers a path that the container needs."""
    used = {"/", "/dev/shm", "/tmp"}  # noqa: S108
    for index, volume in enumerate(spec.cluster.volumes):
        path = "/" + volume.path.strip("/")
        if path in used or ".." in path.split("/"):
            yield Problem(
                f"cluster.volumes.{index}.path",
                volume.path,
                "is already used, or contains ..",
                "choose another path",
            )
        used.add(path)


MAX_ARGUMENT = 131_071  # maximum bytes of one argument or variable in Linux (MAX_ARG_STRLEN)
MAX_ANNOTATIONS = 240 * 1024  # bytes; the limit of Kubernetes is 256 KiB per object, and controllers add some


def check_text_sizes(spec: Spec) -> Iterator[Problem]:
    """No variable exceeds the limit of Linux, and no annotations exceed the limit of Kubernetes."""
    for name, value in spec.cluster.environment.items():
        if (size := len(f"{name}={value}".encode())) > MAX_ARGUMENT:
            yield Problem(
                f"cluster.environment.{name}",
                f"{size} bytes",
                f"is longer than Linux allows ({MAX_ARGUMENT:,} bytes)",
                "put it into a file on one of cluster.volumes, and give its path here",
            )
    texts_by_field = {
        "cluster.annotations": spec.cluster.annotations,
        "cluster.steps.annotations": spec.cluster.steps.annotations,
    }
    for section, settings in (("kserve", spec.serving.kserve), ("deployment", spec.serving.deployment)):
        if settings is not None:
            texts_by_field[f"serving.{section}.annotations"] = settings.annotations
    for field, texts in texts_by_field.items():
        if (size := sum(len(f"{name}{value}".encode()) for name, value in texts.items())) > MAX_ANNOTATIONS:
            message = f"are longer than Kubernetes allows ({MAX_ANNOTATIONS:,} bytes in all)"
            yield Problem(field, f"{size} bytes", message, "remove long texts, or keep them in a ConfigMap")


def check_secret_order(spec: Spec) -> Iterator[Problem]:
    """The site's Secret is the last one. Ranks get its keys by name, which override those of whole Secrets."""
    names = spec.cluster.secrets
    if SECRETS in names[:-1]:
        message = f"names {SECRETS} before another Secret, and in ranks the keys of {SECRETS} override others"
        yield Problem("cluster.secrets", list(names), message, f"name {SECRETS} last, or not at all")


def check_reserved_environment(spec: Spec) -> Iterator[Problem]:
    """Variables of the launchers are not set in the spec, and the spec contains no secret."""
    for name, value in spec.cluster.environment.items():
        field = f"cluster.environment.{name}"
        if names_secret(name) or carries_secret(value):
            yield Problem(
                field,
                "(hidden)",
                "looks like a secret",
                "keep it in a Kubernetes Secret, and name the Secret in cluster.secrets",
            )
        elif instead := RESERVED.get(name, "the other fields of cluster" if name.startswith("PET_") else None):
            yield Problem(field, value, "is set by the launcher", f"remove it, and use {instead}")


def check_reserved_metadata(spec: Spec) -> Iterator[Problem]:
    """Labels and annotations that Holdfast or an operator uses are not set in the spec."""
    cluster = spec.cluster
    for place, section in (("cluster", cluster), ("cluster.steps", cluster.steps)):
        for kind in ("labels", "annotations"):
            for key, value in getattr(section, kind).items():
                instead = OURS.get(key) or ("remove it" if key.startswith("holdfast/") else "")
                if instead and not (key == INJECT and place == "cluster.steps"):
                    yield Problem(f"{place}.{kind}.{key}", value, "is set by Holdfast", instead)


def check_cache_size(spec: Spec) -> Iterator[Problem]:
    """The cache of the datasets fits on the disk that the pods request."""
    limit = spec.cluster.environment.get("HOLDFAST_CACHE_GIB", "0")
    steps = spec.cluster.steps
    disks = {
        "resources": spec.cluster.resources.ephemeral_storage,
        "steps.divide": steps.divide.ephemeral_storage,
        "steps.tokenise": steps.tokenise.ephemeral_storage,
        "steps.preprocess": steps.preprocess.ephemeral_storage,
        "steps.evaluate": steps.evaluate.ephemeral_storage,
    }
    place, disk = min(disks.items(), key=lambda item: amount(item[1]))
    with suppress(ValueError):  # the steps refuse a value that is not a number
        if float(limit) * 2**30 > amount(disk):
            yield Problem(
                "cluster.environment.HOLDFAST_CACHE_GIB",
                limit,
                f"is above cluster.{place}.ephemeral_storage = {disk}",
                "lower it, remove it (the default is three quarters of that), or request more disk",
            )
