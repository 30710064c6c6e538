"""Rules between fields: combinations that a single field's type cannot refuse, and machinery that does not exist yet.

Each rule is a small function from a spec to the problems it sees. A field whose machinery comes later is listed in
`NOT_YET`: it is part of the schema, and any value but its default is refused, so that nothing is silently ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import reduce
from zoneinfo import ZoneInfo, available_timezones

from holdfast.components.spec.cluster import amount
from holdfast.components.spec.errors import Problem
from holdfast.components.spec.tree import Spec

JOB_NAMES = {"trainjob": "TrainJob", "volcano": "Volcano Job"}

Rule = Callable[[Spec], Iterator[Problem]]

# field -> the values that work today
NOT_YET: dict[str, tuple[object, ...]] = {
    "model.experts": (1,),
    "training.precision": ("fp32", "bf16"),
    "training.determinism": ("off", "exact"),
    "training.on_divergence": ("stop",),
    "training.activation_checkpointing": ("none",),
    "parallel.tensor": (1,),
    "parallel.pipeline": (1,),
    "parallel.context": (1,),
    "parallel.expert": (1,),
    "checkpoint.compression": ("none",),
    "evaluation.tasks": ((),),
}


_SECRET = re.compile(r"(?i)secret|passw|credential|api_?key|access_?key|(^|_)token$")

# Environment variables that the launchers set, and the field that a person sets instead.
RESERVED = {
    "OMP_NUM_THREADS": "parallel.threads",
    **dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "cluster.nodes"),
}


def names_secret(name: str) -> bool:
    """Whether a key looks as if its value were a secret."""
    return bool(_SECRET.search(name))


def carries_secret(url: str) -> bool:
    """Whether a URL has a password, a user (that of ssh://git@host is none) or a query such as a signature's."""
    scheme, separator, rest = url.partition("://")
    place, _, query = rest.partition("?")
    user, at, _ = place.partition("/")[0].rpartition("@")
    return bool(separator) and ((bool(at) and (":" in user or "ssh" not in scheme)) or "=" in query)


def value_at(spec: Spec, field: str, absent: object) -> object:
    """The value at a dotted path, such as `training.steps`; `absent` when a part of it was refused."""
    try:
        return reduce(getattr, field.split("."), spec)
    except AttributeError:
        return absent


def not_yet(spec: Spec) -> Iterator[Problem]:
    """Fields whose machinery does not exist yet keep their working values."""
    for field, working in NOT_YET.items():
        value = value_at(spec, field, working[0])
        if value not in working:
            shown = " or ".join(repr(choice) for choice in working)
            yield Problem(field, value, "is planned and does not work in this version", f"use {shown}")


def batch_divides(spec: Spec) -> Iterator[Problem]:
    """The global batch is a whole number of micro-batches on every rank."""
    model_ranks = spec.parallel.tensor * spec.parallel.pipeline * spec.parallel.context
    if spec.world_size % model_ranks:
        yield Problem(
            "parallel.processes",
            spec.parallel.processes,
            f"{spec.world_size} ranks cannot be split into groups of tensor x pipeline x context = {model_ranks}",
            f"make processes x nodes a multiple of {model_ranks}",
        )
        return
    unit = spec.training.micro_batch * spec.data_parallel_size
    if spec.training.global_batch % unit:
        lower = spec.training.global_batch // unit * unit
        choices = " or ".join(str(choice) for choice in (lower, lower + unit) if choice)
        yield Problem(
            "training.global_batch",
            spec.training.global_batch,
            f"is not a multiple of micro_batch x data-parallel ranks = {spec.training.micro_batch} x "
            f"{spec.data_parallel_size} = {unit}",
            f"use {choices}, or change training.micro_batch",
        )


def heads_divide(spec: Spec) -> Iterator[Problem]:
    """Heads fill the width, key/value heads divide the heads, and the tensor degree divides both."""
    model, tensor = spec.model, spec.parallel.tensor
    even = -(-model.hidden // (2 * model.heads)) * 2 * model.heads
    if model.hidden % model.heads:
        yield Problem(
            "model.hidden", model.hidden, f"is not a multiple of model.heads = {model.heads}", f"use {even}"
        )  # fmt: skip
    elif model.head_width % 2:
        yield Problem(
            "model.hidden", model.hidden, f"gives heads of odd width {model.head_width}; rotary positions need pairs",
            f"use {even}",
        )  # fmt: skip
    if model.heads % model.key_value_heads:
        divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        yield Problem(
            "model.kv_heads", model.kv_heads, f"does not divide model.heads = {model.heads}", f"use one of {divisors}"
        )
    for field, heads in (("model.heads", model.heads), ("model.kv_heads", model.key_value_heads)):
        if heads % tensor:
            yield Problem(
                field, heads, f"is not divisible by parallel.tensor = {tensor}",
                f"use a multiple of {tensor}, or a smaller parallel.tensor",
            )  # fmt: skip


def stages_fit(spec: Spec) -> Iterator[Problem]:
    """Every pipeline stage has a layer."""
    if spec.parallel.pipeline > spec.model.layers:
        yield Problem(
            "parallel.pipeline", spec.parallel.pipeline, f"is more than the {spec.model.layers} layers of the model",
            f"use at most {spec.model.layers}",
        )  # fmt: skip


def warmup_fits(spec: Spec) -> Iterator[Problem]:
    """The warm-up ends before the run does."""
    if spec.training.schedule.warmup_steps >= spec.training.steps:
        yield Problem(
            "training.schedule.warmup_steps",
            spec.training.schedule.warmup_steps,
            f"is not below training.steps = {spec.training.steps}",
            f"use at most {spec.training.steps - 1}",
        )


def nodes_ordered(spec: Spec) -> Iterator[Problem]:
    """The smallest number of nodes is not above the largest."""
    if spec.cluster.nodes.min > spec.cluster.nodes.max:
        yield Problem(
            "cluster.nodes.min", spec.cluster.nodes.min, f"is above cluster.nodes.max = {spec.cluster.nodes.max}",
            f"use at most {spec.cluster.nodes.max}",
        )  # fmt: skip


def elastic_nodes_are_possible(spec: Spec) -> Iterator[Problem]:
    """A job whose number of nodes may change says that its bits may, and divides its batch at every size."""
    nodes, training = spec.cluster.nodes, spec.training
    if nodes.min >= nodes.max:
        return
    if training.determinism == "exact":
        yield Problem(
            "cluster.nodes.min", nodes.min,
            f"is below cluster.nodes.max = {nodes.max}, and another number of nodes gives other bits",
            f"use {nodes.max}, or training.determinism: off",
        )  # fmt: skip
    if spec.parallel.engine == "deepspeed":
        yield Problem(
            "cluster.nodes.min", nodes.min, "is below cluster.nodes.max, and DeepSpeed fixes the number of ranks",
            f"use {nodes.max}, or parallel.strategy: fsdp",
        )  # fmt: skip
    for size in range(nodes.min, nodes.max):
        unit = training.micro_batch * spec.parallel.processes * size
        if training.global_batch % unit:
            yield Problem(
                "training.global_batch", training.global_batch,
                f"cannot be divided over {size} nodes: it is not a multiple of {unit}",
                "choose nodes.min, nodes.max and micro_batch so that every number of nodes between them divides it",
            )  # fmt: skip
            return


def cluster_words_agree(spec: Spec) -> Iterator[Problem]:
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
            "remove it: the light steps then run on CPU",
        )  # fmt: skip
    for index, toleration in enumerate(cluster.tolerations):
        if (toleration.operator == "Equal") != (toleration.value is not None):
            yield Problem(
                f"cluster.tolerations.{index}.value", toleration.value,
                f"does not go with operator: {toleration.operator}", "give a value for Equal, and none for Exists",
            )  # fmt: skip


def topology_is_possible(spec: Spec) -> Iterator[Problem]:
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


def resources_suffice(spec: Spec) -> Iterator[Problem]:
    """Every node asks for something, and /dev/shm, which counts as memory, fits into it."""
    resources = spec.cluster.resources
    for name in ("cpu", "memory"):
        value = getattr(resources, name)
        if not amount(value):
            yield Problem(f"cluster.resources.{name}", value, "is nothing", "ask for more than zero")
    if amount(resources.shared_memory) > amount(resources.memory):
        yield Problem(
            "cluster.resources.shared_memory", resources.shared_memory,
            f"is above cluster.resources.memory = {resources.memory}, which it is part of",
            f"use at most {resources.memory}, or ask for more memory",
        )  # fmt: skip


def mounts_differ(spec: Spec) -> Iterator[Problem]:
    """No two volumes are mounted at one path, and none over what the container needs."""
    taken = {"/", "/dev/shm", "/tmp"}  # noqa: S108
    for index, volume in enumerate(spec.cluster.volumes):
        path = "/" + volume.path.strip("/")
        if path in taken or ".." in path.split("/"):
            yield Problem(
                f"cluster.volumes.{index}.path",
                volume.path,
                "is taken already, or leads upwards",
                "choose another path",
            )
        taken.add(path)


def environment_is_free(spec: Spec) -> Iterator[Problem]:
    """Variables of the launchers are not set by hand, and no secret stands in the spec."""
    for name, value in spec.cluster.environment.items():
        field = f"cluster.environment.{name}"
        if names_secret(name) or carries_secret(value):
            yield Problem(
                field, "(hidden)", "looks like a secret",
                "keep it in a Kubernetes Secret, and name that in cluster.secrets",
            )  # fmt: skip
        elif instead := RESERVED.get(name, "the other fields of cluster" if name.startswith("PET_") else None):
            yield Problem(field, value, "is set by the launcher", f"remove it, and use {instead}")


def something_is_held_out(spec: Spec) -> Iterator[Problem]:
    """There will be text to evaluate on: better said now than after the training."""
    if spec.data.validation_fraction == 0:
        yield Problem(
            "data.validation_fraction", 0, "leaves nothing to evaluate the model on", "use a share such as 0.01"
        )


def evaluation_words_agree(spec: Spec) -> Iterator[Problem]:
    """What only a comparison or only samples use is not given without them."""
    evaluation = spec.evaluation
    if evaluation.champion_tolerance and evaluation.versus_champion != "not_worse":
        yield Problem(
            "evaluation.champion_tolerance", evaluation.champion_tolerance,
            f"is not used by versus_champion: {evaluation.versus_champion}", "remove it, or use not_worse",
        )  # fmt: skip
    for name in ("sample_tokens", "temperature"):
        value = getattr(evaluation, name)
        if not evaluation.prompts and value != type(evaluation).model_fields[name].default:
            yield Problem(
                f"evaluation.{name}", value, "is not used without prompts", "remove it, or give evaluation.prompts"
            )


def text_field_is_read(spec: Spec) -> Iterator[Problem]:
    """Plain text has no fields."""
    for index, source in enumerate(spec.data.sources):
        if source.format == "text" and source.text_field != type(source).model_fields["text_field"].default:
            yield Problem(
                f"data.sources.{index}.text_field", source.text_field, "is not used by format: text",
                "remove it, or use format: jsonl or parquet",
            )  # fmt: skip


def weights_given(spec: Spec) -> Iterator[Problem]:
    """Mixture weights are given for every source or for none."""
    weighted = [source.weight is not None for source in spec.data.sources]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        yield Problem(
            f"data.sources.{index}.weight", None, "is missing while other sources have a weight",
            "give every source a weight, or none",
        )  # fmt: skip


def tokenizer_given(spec: Spec) -> Iterator[Problem]:
    """A tokenizer file is named exactly when one is used, and what trains one is given only when one is trained."""
    tokenizer = spec.data.tokenizer
    if tokenizer.kind == "file":
        for name in ("vocabulary", "sample_bytes"):
            value = getattr(tokenizer, name)
            if value != type(tokenizer).model_fields[name].default:
                yield Problem(f"data.tokenizer.{name}", value, "is not used by kind: file", "remove it")
    if tokenizer.kind == "file" and not tokenizer.path:
        yield Problem(
            "data.tokenizer.path", None, "is missing for kind: file", "name a tokenizer.json, or use kind: bpe"
        )
    if tokenizer.kind == "bpe" and tokenizer.path:
        yield Problem("data.tokenizer.path", tokenizer.path, "is not used by kind: bpe", "remove it, or use kind: file")


def shuffle_words_agree(spec: Spec) -> Iterator[Problem]:
    """What describes blocks is given only for a shuffle of blocks."""
    shuffle = spec.data.shuffle
    for name in ("block_tokens", "window"):
        value = getattr(shuffle, name)
        if shuffle.kind == "global" and value != type(shuffle).model_fields[name].default:
            remedy = "remove it, or use kind: blocks"
            yield Problem(f"data.shuffle.{name}", value, "is not used by kind: global", remedy)


def lengths_ordered(spec: Spec) -> Iterator[Problem]:
    """Some length of a document passes both filters."""
    cleaning = spec.data.cleaning
    if cleaning.min_characters > cleaning.max_characters:
        yield Problem(
            "data.cleaning.min_characters", cleaning.min_characters,
            f"is above data.cleaning.max_characters = {cleaning.max_characters}: every document would be dropped",
            f"use at most {cleaning.max_characters}",
        )  # fmt: skip


def dvc_complete(spec: Spec) -> Iterator[Problem]:
    """`repo` and `revision` belong to DVC sources."""
    for index, source in enumerate(spec.data.sources):
        if source.uri.startswith("dvc:"):
            continue
        for field, value, default in (("repo", source.repo, "."), ("revision", source.revision, None)):
            if value != default:
                yield Problem(
                    f"data.sources.{index}.{field}", value, "is only for `dvc:` sources",
                    f"remove it, or write the source as dvc:{source.uri}",
                )  # fmt: skip


def no_secret_in_urls(spec: Spec) -> Iterator[Problem]:
    """Credentials never stand in a spec."""
    urls = [
        ("store", spec.store),
        ("model.init_from", spec.model.init_from),
        ("data.tokenizer.path", spec.data.tokenizer.path),
    ]
    for index, source in enumerate(spec.data.sources):
        urls += [(f"data.sources.{index}.uri", source.uri), (f"data.sources.{index}.repo", source.repo)]
    for field, url in urls:
        if url and carries_secret(url):
            yield Problem(
                field,
                "(hidden)",
                "carries credentials or a query",
                "remove them; credentials come from the environment",
            )


def store_known(spec: Spec) -> Iterator[Problem]:
    """The store is one that exists."""
    if spec.store is not None and not re.match(r"file:///|s3://[^/]", spec.store):
        shown = "(hidden)" if carries_secret(spec.store) else spec.store
        yield Problem("store", shown, "is neither file:/// nor s3://", "write file:///path or s3://bucket/prefix")


def schedule_parses(spec: Spec) -> Iterator[Problem]:
    """The cron expression and the time zone mean something, and only one kind of schedule is given."""
    from croniter import croniter

    schedule = spec.schedule
    if schedule.cron is not None and schedule.every_minutes is not None:
        yield Problem(
            "schedule.every_minutes", schedule.every_minutes, "stands beside schedule.cron", "keep one of the two"
        )
    if schedule.cron is not None and (len(schedule.cron.split()) != 5 or not croniter.is_valid(schedule.cron)):
        yield Problem(
            "schedule.cron", schedule.cron, "is not a five-field cron expression",
            "write minute hour day month weekday, such as '0 3 * * 1'",
        )  # fmt: skip
    try:
        ZoneInfo(schedule.timezone)
    except (KeyError, ValueError, OSError):
        from difflib import get_close_matches

        close = get_close_matches(schedule.timezone, sorted(available_timezones()), 1)
        yield Problem(
            "schedule.timezone", schedule.timezone, "is not an IANA time zone",
            f"did you mean {close[0]!r}?" if close else "use a name such as 'Europe/Berlin'",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    not_yet,
    batch_divides,
    heads_divide,
    stages_fit,
    warmup_fits,
    nodes_ordered,
    elastic_nodes_are_possible,
    cluster_words_agree,
    topology_is_possible,
    resources_suffice,
    mounts_differ,
    environment_is_free,
    something_is_held_out,
    evaluation_words_agree,
    text_field_is_read,
    weights_given,
    tokenizer_given,
    shuffle_words_agree,
    lengths_ordered,
    dvc_complete,
    no_secret_in_urls,
    store_known,
    schedule_parses,
)


def problems(spec: Spec) -> list[Problem]:
    """Everything that the rules object to, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(spec)]


def problems_of_part(spec: Spec) -> list[Problem]:
    """The same of a spec from which the fields that were refused are missing: a rule ends where it would need one."""
    found: list[Problem] = []
    for rule in RULES:
        with suppress(AttributeError):
            for problem in rule(spec):
                found.append(problem)
    return found
