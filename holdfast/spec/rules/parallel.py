"""Rules of `parallel`: which ways of distributing a step over ranks can be combined."""

from collections.abc import Iterator
from math import lcm

from holdfast.spec.errors import Problem
from holdfast.spec.families import MIXTURES
from holdfast.spec.rules.model import nearest_multiples
from holdfast.spec.section import Section
from holdfast.spec.tree import Spec

GROUPED_BYTES = 16  # torch.nn.functional.grouped_mm: rows begin at multiples of this
CHOSEN = tuple("strategy replicas reshard offload offload_path tensor pipeline stages schedule context expert".split())


def check_auto_layout(spec: Spec) -> Iterator[Problem]:
    """No field that the planner chooses is set. (Under elastic determinism the spec sets the micro-batch.)"""
    parallel, training = spec.parallel, spec.training
    if not parallel.auto:
        return
    chosen: list[tuple[str, Section, str]] = [(f"parallel.{name}", parallel, name) for name in CHOSEN]
    chosen.append(("training.activation_checkpointing", training, "activation_checkpointing"))
    if training.determinism != "elastic" and not training.auto_micro_batch:  # `check_auto_micro_batch` reports it
        chosen.append(("training.micro_batch", training, "micro_batch"))
    for field, section, name in chosen:
        if (value := getattr(section, name)) != type(section).model_fields[name].default:
            message = "is not used by parallel: auto" if name.startswith("offload") else "is chosen by parallel: auto"
            yield Problem(
                field,
                value,
                message,
                "remove it, or remove auto and give the layout yourself: holdfast plan SPEC --apply writes one",
            )


def check_deal(spec: Spec) -> Iterator[Problem]:
    """Micro-batches are dealt by speed where the deal changes no bit."""
    if spec.parallel.deal == "equal":
        return
    if spec.training.determinism != "elastic" or spec.parallel.strategy != "ddp":
        yield Problem(
            "parallel.deal",
            spec.parallel.deal,
            "needs sums whose order does not depend on the ranks, and whole replicas",
            "use training.determinism: elastic with parallel.strategy: ddp, or deal: equal",
        )


def check_tensor_parallel(spec: Spec) -> Iterator[Problem]:
    """Tensor parallelism needs the torch engine, and splits the sequence and the feed-forward layer evenly. Of the
    experts it splits only the shared ones, which are one layer. (`check_heads` checks the heads. The vocabulary may be
    split unevenly.)"""
    tensor, model = spec.parallel.tensor, spec.model
    if tensor == 1:
        return
    yield from _torch_engine(spec, "parallel.tensor", tensor)
    if spec.training.determinism == "elastic":
        yield Problem(
            "parallel.tensor",
            tensor,
            "changes which numbers are added, not only their order, so no order of sums can "
            "give the bits of one rank (training.determinism: elastic)",
            "use 1, or training.determinism: exact",
        )
    feed_forward, width = "the feed-forward layer", model.ffn_width
    if model.experts > 1:
        width *= model.routing.shared
        feed_forward = f"the shared experts (width {width} in total)"
    for field, size, cut, parts in (
        ("model.context", model.context, model.context, "the sequence"),
        ("model.ffn", model.ffn_width, width, feed_forward),
        *(
            [("model.dense_ffn", model.dense_width, model.dense_width, "the dense layers")]
            if model.dense_layers
            else []
        ),
    ):
        if cut % tensor:
            yield Problem(
                field,
                size,
                f"is not divisible by parallel.tensor = {tensor}, which splits {parts} evenly",
                f"use a multiple of {tensor}, or a smaller parallel.tensor",
            )


def check_expert_parallel(spec: Spec) -> Iterator[Problem]:
    """Experts are distributed evenly over ranks with different tokens, within one replica of shards."""
    expert, parallel, experts = spec.parallel.expert, spec.parallel, spec.model.experts
    if expert == 1:
        return
    if experts % expert or experts == 1:
        yield Problem(
            "parallel.expert",
            expert,
            f"does not divide model.experts = {experts}",
            f"use one of {[n for n in range(1, experts + 1) if experts % n == 0]}",
        )
        return
    ranks = spec.world_size // parallel.pipeline  # each has different tokens
    if parallel.strategy == "fsdp" and parallel.replicas > 0 and ranks % parallel.replicas == 0:
        ranks //= parallel.replicas
    if ranks % expert:
        peers = "ranks of a replica" if parallel.replicas > 1 else "ranks of a stage"
        yield Problem(
            "parallel.expert",
            expert,
            f"does not divide the {ranks} {peers}",
            f"use one of {[n for n in range(1, ranks + 1) if ranks % n == 0]}",
        )


def check_expert_layout(spec: Spec) -> Iterator[Problem]:
    """Settings that a mixture of experts does not support."""
    if spec.model.experts == 1 or spec.model.family not in MIXTURES:
        return
    if spec.training.compile:
        yield Problem(
            "training.compile",
            True,
            f"is not supported with model.experts = {spec.model.experts}, because the number "
            "of tokens of an expert varies",
            "use false",
        )
    unit = GROUPED_BYTES // (4 if spec.training.precision == "fp32" else 2)
    for field, width in (("model.hidden", spec.model.hidden), ("model.ffn", spec.model.ffn_width)):
        if width % unit:
            yield Problem(
                field,
                width,
                f"makes rows in {spec.training.precision} that are not a multiple of {GROUPED_BYTES} "
                "bytes, which the products of experts need",
                f"use a multiple of {unit}",
            )
    if spec.training.determinism == "elastic" and spec.parallel.expert > 1:
        yield Problem(
            "parallel.expert",
            spec.parallel.expert,
            "sums the rows of all ranks in one product of an expert, while "
            "one rank sums them by micro-batch (training.determinism: elastic)",
            "use 1, or training.determinism: exact",
        )
    yield from _torch_engine(spec, "model.experts", spec.model.experts)


def check_context_parallel(spec: Spec) -> Iterator[Problem]:
    """Context parallelism needs the torch engine, and gives every rank two equal chunks of a sequence."""
    ranks, length = spec.parallel.context, spec.model.context
    if ranks == 1:
        return
    yield from _torch_engine(spec, "parallel.context", ranks)
    if spec.training.determinism == "elastic":
        yield Problem(
            "parallel.context",
            ranks,
            "sums the gradients of parts of a sequence, while one rank sums the whole "
            "sequence (training.determinism: elastic)",
            "use 1, or training.determinism: exact",
        )
    unit = ranks * lcm(2, spec.parallel.tensor)  # tensor parallelism splits a rank's part again
    if length % unit:
        yield Problem(
            "model.context",
            length,
            f"is not a multiple of {unit}, so parallel.context = {ranks} and "
            f"parallel.tensor = {spec.parallel.tensor} cannot split it evenly",
            f"use {nearest_multiples(length, unit)}, or a smaller parallel.context",
        )


def check_pipeline_stages(spec: Spec) -> Iterator[Problem]:
    """A pipeline needs the torch engine, and its micro-batches fill the schedule."""
    parallel, stages = spec.parallel, spec.parallel.pipeline
    if stages == 1:
        if parallel.schedule != "1f1b":
            yield Problem(
                "parallel.schedule",
                parallel.schedule,
                "has no effect without a pipeline",
                "use parallel.pipeline: 2 or more, or remove it",
            )
        return
    yield from _torch_engine(spec, "parallel.pipeline", stages)
    if spec.training.determinism == "elastic":
        yield Problem(
            "parallel.pipeline",
            stages,
            "is not supported with determinism: elastic, because no stage has all sums",
            "use 1, or training.determinism: exact",
        )
    if parallel.schedule == "zero_bubble" and parallel.strategy == "fsdp" and parallel.reshard != "never":
        yield Problem(
            "parallel.reshard",
            parallel.reshard,
            "frees weights that the second half of a backward pass needs (parallel.schedule: zero_bubble)",
            "use never, or parallel.schedule: 1f1b",
        )
    if parallel.schedule == "zero_bubble" and parallel.tensor > 1:
        yield Problem(
            "parallel.schedule",
            "zero_bubble",
            "is not supported with parallel.tensor yet",
            "use 1f1b, or parallel.tensor: 1",
        )
    if parallel.schedule == "zero_bubble" and spec.training.compile:
        yield Problem(
            "parallel.schedule",
            "zero_bubble",
            "splits the backward pass in two, and a compiled model has only one",
            "use 1f1b, or training.compile: false",
        )
    if parallel.schedule == "zero_bubble" and spec.training.activation_checkpointing != "none":
        yield Problem(
            "parallel.schedule",
            "zero_bubble",
            "would recompute activations for each half of the backward pass",
            "use 1f1b, or training.activation_checkpointing: none",
        )
    if not spec.data_parallel_size:
        return  # `check_batch_size` reports it
    count, rounds = spec.accumulation, max(1, spec.accumulation // stages)
    few = parallel.schedule == "1f1b" and count < stages
    if few or (parallel.schedule in ("interleaved", "zero_bubble") and count % rounds):
        yield Problem(
            "parallel.schedule",
            parallel.schedule,
            f"is not filled by {count} micro-batches in {stages} stages",
            f"choose training.micro_batch such that a data-parallel rank has a multiple of {stages} micro-batches",
        )


def check_stage_layers(spec: Spec) -> Iterator[Problem]:
    """The given stages match the number of stages of the pipeline, and contain every layer once."""
    parallel, layers = spec.parallel, spec.model.layers
    if parallel.stages is None:
        return
    stages = list(parallel.stages)
    count = parallel.pipeline * (2 if parallel.schedule == "interleaved" else 1)
    if parallel.pipeline == 1:
        message, remedy = "has no effect without a pipeline", "use parallel.pipeline: 2 or more, or remove it"
    elif len(stages) != count:
        of_ranks = " of interleaved ranks, two each" if count != parallel.pipeline else ""
        message = f"has {len(stages)} stages, and parallel.pipeline = {parallel.pipeline} needs {count}{of_ranks}"
        remedy = f"give {count} numbers, or remove it for even stages"
    elif min(stages) < 1:
        message, remedy = "has a stage without a layer", "give each stage at least 1"
    elif sum(stages) != layers:
        message = f"has {sum(stages)} layers, and the model has {layers} (model.layers)"
        remedy = f"give numbers whose sum is {layers}, or remove it for even stages"
    else:
        return
    yield Problem("parallel.stages", stages, message, remedy)


def check_replicas(spec: Spec) -> Iterator[Problem]:
    """Replicas of shards need FSDP2, and divide the data-parallel ranks."""
    replicas, strategy, ranks = spec.parallel.replicas, spec.parallel.strategy, spec.data_parallel_size
    if replicas == 1:
        return
    if strategy != "fsdp":
        reason = "every group of ranks is a replica" if strategy == "ddp" else "DeepSpeed shards over all ranks"
        yield Problem(
            "parallel.replicas",
            replicas,
            f"is not supported with parallel.strategy: {strategy}, because {reason}",
            "use parallel.strategy: fsdp, or 1",
        )
    elif spec.training.determinism == "elastic":
        yield Problem(
            "parallel.replicas",
            replicas,
            "is not supported with training.determinism: elastic, which sums over all ranks together",
            "use 1, or parallel.strategy: ddp",
        )
    if ranks % replicas:
        divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
        yield Problem(
            "parallel.replicas", replicas, f"does not divide the {ranks} data-parallel ranks", f"use one of {divisors}"
        )


def check_resharding(spec: Spec) -> Iterator[Problem]:
    """Only FSDP2 gathers and frees weights."""
    reshard, strategy = spec.parallel.reshard, spec.parallel.strategy
    if reshard != "always" and strategy != "fsdp":
        yield Problem(
            "parallel.reshard",
            reshard,
            f"is not supported with parallel.strategy: {strategy}",
            "use parallel.strategy: fsdp, or always",
        )


def check_offload(spec: Spec) -> Iterator[Problem]:
    """DeepSpeed and FSDP2 support offload to host memory. Only sharded weights can be offloaded."""
    offload, strategy = spec.parallel.offload, spec.parallel.strategy
    if offload == "none":
        return
    if strategy == "ddp":
        yield Problem(
            "parallel.offload",
            offload,
            "is not supported with parallel.strategy: ddp, which keeps everything on each rank",
            "use parallel.strategy: fsdp with parameters, or zero2, or none",
        )
    elif strategy == "fsdp":
        yield from _fsdp_offloads(spec)
    elif offload != "optimizer" and strategy != "zero3":
        yield Problem(
            "parallel.offload",
            offload,
            f"offloads weights, which parallel.strategy: {strategy} keeps whole on each rank",
            "use parallel.strategy: zero3, or optimizer",
        )
    elif offload == "parameters_on_disk" and spec.parallel.offload_path is None:
        yield Problem(
            "parallel.offload",
            offload,
            "needs a disk",
            "give parallel.offload_path a folder on a local disk of each node, or use parameters",
        )


def check_offload_path(spec: Spec) -> Iterator[Problem]:
    """Only ZeRO 3 with `offload` uses a disk."""
    path, parallel = spec.parallel.offload_path, spec.parallel
    if path is None or parallel.auto:  # `check_auto_layout` reports it
        return
    if not path.startswith("/") or ".." in path.split("/"):
        yield Problem("parallel.offload_path", path, "is not an absolute path", "use a path that begins with /")
    if parallel.strategy != "zero3":
        yield Problem(
            "parallel.offload_path",
            path,
            f"is not supported with parallel.strategy: {parallel.strategy}",
            "use parallel.strategy: zero3, or remove it",
        )
    elif parallel.offload == "none":
        yield Problem(
            "parallel.offload_path",
            path,
            "has no effect with parallel.offload: none",
            "use parallel.offload: optimizer, or remove it",
        )


def _fsdp_offloads(spec: Spec) -> Iterator[Problem]:
    offload, parallel = spec.parallel.offload, spec.parallel
    if offload == "parameters_on_disk":
        yield Problem(
            "parallel.offload",
            offload,
            "needs swap files, which parallel.strategy: fsdp does not have",
            "use parameters, or parallel.strategy: zero3",
        )
    if offload == "optimizer":
        yield Problem(
            "parallel.offload",
            offload,
            "offloads only the optimizer state, which parallel.strategy: fsdp moves "
            "together with weights and gradients",
            "use parameters, or parallel.strategy: zero3",
        )
    limits = {
        f"parallel.{name}": (getattr(parallel, name), 1)
        for name in ("replicas", "tensor", "pipeline", "context", "expert")
    } | {"model.experts": (spec.model.experts, 1)}
    unsupported = [
        (field, value, f"use {field}: {allowed}") for field, (value, allowed) in limits.items() if value != allowed
    ]
    if spec.training.determinism == "elastic":
        unsupported.append(("training.determinism", "elastic", "use training.determinism: exact"))
    if spec.training.precision == "fp16":
        unsupported.append(("training.precision", "fp16", "use training.precision: bf16"))
    for field, value, remedy in unsupported:
        yield Problem(
            "parallel.offload",
            offload,
            f"is not supported with {field}: {value} and parallel.strategy: fsdp",
            f"{remedy}, or none",
        )


def _torch_engine(spec: Spec, field: str, value: int) -> Iterator[Problem]:
    if spec.parallel.engine != "torch":
        yield Problem(
            field,
            value,
            f"is not supported with parallel.strategy: {spec.parallel.strategy}",
            "use parallel.strategy: fsdp or ddp, or 1",
        )
