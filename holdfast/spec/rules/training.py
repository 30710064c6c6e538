"""Rules of `training`: the batch divides over the ranks, the warm-up ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.spec.errors import Problem
from holdfast.spec.rules.model import nearest_multiples
from holdfast.spec.training import AUTO, KEEPING, ObjectiveName
from holdfast.spec.tree import Spec

MOST_INCREMENTS = 10_000  # of a ramp; each is a row of a table in every rank


def check_batch_size(spec: Spec) -> Iterator[Problem]:
    """The global batch is a whole number of micro-batches on every rank."""
    model_ranks = spec.parallel.tensor * spec.parallel.pipeline * spec.parallel.context
    if spec.world_size % model_ranks:
        yield Problem(
            "parallel.processes",
            spec.parallel.processes,
            f"gives {spec.world_size} ranks, which do not split into groups of tensor x pipeline x context = "
            f"{model_ranks}",
            f"make processes x nodes a multiple of {model_ranks}",
        )
        return
    if spec.training.determinism == "elastic":
        yield from _check_grains(spec)
        return
    if spec.parallel.auto:  # the planner considers only layouts that divide it
        return
    unit = spec.training.micro_batch * spec.data_parallel_size
    if spec.training.global_batch % unit:
        yield Problem(
            "training.global_batch",
            spec.training.global_batch,
            f"is not a multiple of micro_batch x data-parallel ranks = {spec.training.micro_batch} x "
            f"{spec.data_parallel_size} = {unit}",
            f"use {nearest_multiples(spec.training.global_batch, unit)}, or change training.micro_batch",
        )


def check_auto_micro_batch(spec: Spec) -> Iterator[Problem]:
    """A trial chooses the micro-batch only where it is free: not in the run id, and not chosen by the planner."""
    training, field = spec.training, "training.micro_batch"
    if not training.auto_micro_batch:
        return
    if training.micro_batch != 1:
        remedy = "remove training.auto_micro_batch, or write micro_batch: auto"
        yield Problem(field, training.micro_batch, "is a number, and training.auto_micro_batch is true", remedy)
    if training.determinism == "elastic":
        message = "is not possible with training.determinism: elastic, where the number is part of the run id"
        yield Problem(field, AUTO, message, "write a number, or use training.determinism: exact")
    if spec.parallel.auto:
        yield Problem(field, AUTO, "is chosen by parallel: auto", "remove it, or give the layout yourself")
    if spec.parallel.engine == "deepspeed":
        message = f"is not supported with parallel.strategy: {spec.parallel.strategy}"
        yield Problem(field, AUTO, message, "write a number, or use parallel.strategy: fsdp")


def _check_grains(spec: Spec) -> Iterator[Problem]:
    """Under elastic determinism the global batch is a whole number of micro-batches, at least one for each rank."""
    training, ranks = spec.training, spec.data_parallel_size
    grains, rest = divmod(training.global_batch, training.micro_batch)
    if rest:
        yield Problem(
            "training.global_batch",
            training.global_batch,
            f"is not a multiple of training.micro_batch = {training.micro_batch}",
            f"use {nearest_multiples(training.global_batch, training.micro_batch)}",
        )
    elif ranks > grains:
        yield Problem(
            "training.micro_batch",
            training.micro_batch,
            f"leaves {grains} micro-batches of the global batch for {ranks} ranks",
            f"use at most {max(1, training.global_batch // ranks)}, or fewer ranks",
        )


def check_local_tiers(spec: Spec) -> Iterator[Problem]:
    """Copies on a disk need a path."""
    disk = spec.checkpoint.disk
    if disk.every_steps is not None and disk.path is None:
        yield Problem(
            "checkpoint.disk.path",
            None,
            "is required by checkpoint.disk.every_steps",
            "name a folder on a disk of the nodes, such as /scratch/holdfast",
        )
    if disk.path is not None and (not disk.path.startswith("/") or ".." in disk.path.split("/")):
        yield Problem("checkpoint.disk.path", disk.path, "is not an absolute path", "use a path that begins with /")


def check_elastic_determinism(spec: Spec) -> Iterator[Problem]:
    """Only the torch engine has sums that do not depend on the number of ranks."""
    if spec.training.determinism == "elastic" and spec.parallel.engine != "torch":
        yield Problem(
            "training.determinism",
            "elastic",
            f"is not supported with parallel.strategy: {spec.parallel.strategy}",
            "use parallel.strategy: ddp or fsdp, or training.determinism: exact",
        )


def check_batch_ramp(spec: Spec) -> Iterator[Problem]:
    """A ramp of the batch has whole increments, and each divides over the ranks like the global batch."""
    training, ramp = spec.training, spec.training.batch_ramp
    field = "training.batch_ramp"
    if ramp.start is None or ramp.increment is None:
        if ramp.start is not None or ramp.increment is not None:
            present, missing = ("start", "increment") if ramp.increment is None else ("increment", "start")
            yield Problem(
                f"{field}.{missing}", None, f"is required by {field}.{present}", f"add it, or remove {present}"
            )
        return
    growth = training.global_batch - ramp.start
    if growth <= 0 or growth % ramp.increment:
        yield Problem(
            f"{field}.increment",
            ramp.increment,
            f"does not lead from {ramp.start} to training.global_batch = {training.global_batch}",
            "use a start below it, and an increment that divides the difference",
        )
        return
    if growth // ramp.increment > min(ramp.steps, MOST_INCREMENTS):
        yield Problem(
            f"{field}.increment",
            ramp.increment,
            f"gives {growth // ramp.increment} increments in {ramp.steps} steps",
            f"use a larger increment, for at most one increment per step and {MOST_INCREMENTS} in all",
        )
    elastic = training.determinism == "elastic"
    if spec.parallel.auto and not elastic:  # the planner considers only layouts that divide it
        return
    unit = training.micro_batch * (1 if elastic else max(1, spec.data_parallel_size))
    for name, value in (("start", ramp.start), ("increment", ramp.increment)):
        if value % unit:
            yield Problem(
                f"{field}.{name}",
                value,
                f"is not a multiple of {unit}, the micro-batch" + ("" if elastic else " times the data-parallel ranks"),
                f"use {nearest_multiples(value, unit)}, or another training.micro_batch",
            )
    if elastic and ramp.start // training.micro_batch < spec.data_parallel_size:
        yield Problem(
            f"{field}.start",
            ramp.start,
            f"leaves some of {spec.data_parallel_size} ranks without a micro-batch",
            f"use at least {spec.data_parallel_size * training.micro_batch}, or fewer ranks",
        )
    unable: tuple[tuple[str, object, bool, str], ...] = (
        (
            "parallel.strategy",
            spec.parallel.strategy,
            spec.parallel.engine == "deepspeed",
            "sets the number of accumulated micro-batches only once (DeepSpeed)",
        ),
        (
            "parallel.pipeline",
            spec.parallel.pipeline,
            spec.parallel.pipeline > 1,
            "has a schedule for a fixed number of micro-batches",
        ),
        (
            "data.shuffle.kind",
            spec.data.shuffle.kind,
            spec.data.shuffle.kind == "blocks",
            "distributes samples over a fixed number of rows of a batch",
        ),
    )
    for other, value_of_it, is_used, message in unable:
        if is_used:
            yield Problem(
                other, value_of_it, f"{message}, and {field} changes it", f"use another value, or remove {field}"
            )


def check_learning_rate_scaling(spec: Spec) -> Iterator[Problem]:
    """A learning rate that scales with the batch names the batch for which it is set."""
    schedule = spec.training.schedule
    if schedule.scaling != "none" and schedule.base_batch is None:
        yield Problem(
            "training.schedule.base_batch",
            None,
            f"is required by training.schedule.scaling: {schedule.scaling}",
            "name the global batch for which training.optimizer.learning_rate is set",
        )
    if schedule.scaling == "none" and schedule.base_batch is not None:
        yield Problem(
            "training.schedule.base_batch",
            schedule.base_batch,
            "has no effect without training.schedule.scaling",
            "use scaling: linear or sqrt, or remove it",
        )


def check_compression(spec: Spec) -> Iterator[Problem]:
    """Gradients are compressed only between whole replicas, whose sums have a fixed order and no additional errors."""
    training, parallel = spec.training, spec.parallel
    if training.gradient_compression == "none":
        return
    field, kind = "training.gradient_compression", training.gradient_compression
    if parallel.strategy != "ddp" or parallel.tensor * parallel.pipeline * parallel.context * parallel.expert > 1:
        yield Problem(
            field,
            kind,
            "is only for whole replicas, because sharded or split models send parts of gradients",
            "use parallel.strategy: ddp without other degrees, or none",
        )
    if training.determinism == "elastic":
        yield Problem(
            field,
            kind,
            "rounds sums of ranks, so bits depend on their number, and training.determinism is elastic",
            "use none, or training.determinism: exact",
        )
    if kind in KEEPING and (training.precision == "fp16" or training.anomalies.action == "skip"):
        because = "precision: fp16" if training.precision == "fp16" else "anomalies.action: skip"
        yield Problem(
            field,
            kind,
            f"keeps the error of each gradient, and training.{because} could make it infinite or NaN",
            "use fp16, bf16 or none; or bf16 arithmetic and anomalies.action: rewind",
        )


def check_optimizer(spec: Spec) -> Iterator[Problem]:
    """LAMB needs norms of whole tensors. The torch engine sums them if every rank has a part of every tensor."""
    parallel = spec.parallel
    if spec.training.optimizer.kind != "lamb":
        return
    unable = {
        "strategy": parallel.strategy if parallel.engine == "deepspeed" else None,
        "pipeline": parallel.pipeline if parallel.pipeline > 1 else None,
        "offload": parallel.offload if parallel.offload != "none" else None,
    }
    for field, value in unable.items():
        if value is not None:
            yield Problem(
                "training.optimizer.kind",
                "lamb",
                f"is not supported with parallel.{field}: {value}",
                "use adamw, or parallel.strategy: ddp or fsdp without pipeline and offload",
            )


def check_anomalies(spec: Spec) -> Iterator[Problem]:
    """Only the torch engine can discard an update."""
    anomalies = spec.training.anomalies
    if anomalies.action != "stop" and spec.parallel.engine != "torch":
        yield Problem(
            "training.anomalies.action",
            anomalies.action,
            f"is not supported with parallel.strategy: {spec.parallel.strategy}, because DeepSpeed applies an update "
            "before it can be discarded",
            "use parallel.strategy: ddp or fsdp, or training.anomalies.action: stop",
        )


def check_warmup(spec: Spec) -> Iterator[Problem]:
    """The warm-up ends before the run does. A factor of user code replaces warm-up and decay."""
    if spec.training.schedule.warmup_steps >= spec.training.steps:
        yield Problem(
            "training.schedule.warmup_steps",
            spec.training.schedule.warmup_steps,
            f"is not below training.steps = {spec.training.steps}",
            f"use at most {spec.training.steps - 1}",
        )
    schedule = spec.training.schedule
    for name in ("kind", "warmup_steps", "final_ratio") if schedule.factor is not None else ():
        if (value := getattr(schedule, name)) != type(schedule).model_fields[name].default:
            yield Problem(f"training.schedule.{name}", value, "is not used with a factor of your own", "remove it")


SCALAR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma3_text", "olmo2", "olmo3")

# The objectives of each kind of data; the first is that of `training.objective: auto`.
OBJECTIVES: Mapping[str, tuple[ObjectiveName, ...]] = {
    "text": ("next_token", "distillation"),
    "chat": ("next_token", "distillation"),
    "preferences": ("dpo", "orpo", "reward"),
    "unpaired": ("kto",),
}


def objective_name(spec: Spec) -> ObjectiveName:
    """The objective of a spec: the one that it names, or that of its head and data."""
    named = spec.training.objective.kind
    if named == "auto" and spec.model.head == "scalar":
        return "reward"
    return OBJECTIVES[spec.data.kind][0] if named == "auto" else named


def check_preferences(spec: Spec) -> Iterator[Problem]:
    """The objective fits the data. Preferences need reference weights (except orpo), the torch engine, and whole or
    sharded models."""
    preference, objective, kind = spec.training.preference, spec.training.objective.kind, spec.data.kind
    fitting = OBJECTIVES[kind]
    if objective not in ("auto", *fitting):
        kinds = [other for other, objectives in OBJECTIVES.items() if objective in objectives]
        yield Problem(
            "training.objective",
            objective,
            f"cannot be trained on data.kind: {kind}",
            f"use data.kind: {' or '.join(kinds)}, or objective: {' or '.join(fitting)}",
        )
        return
    scalar = spec.model.head == "scalar"
    used = ("reward" if scalar else fitting[0]) if objective == "auto" else objective
    if scalar != (used == "reward") or (scalar and kind != "preferences"):
        yield Problem(
            "model.head",
            spec.model.head,
            f"does not fit the objective {used} (data.kind: {kind})",
            "use data.kind: preferences, or head: tokens" if scalar else "use scalar, or another training.objective",
        )
        return
    if scalar:
        yield from _check_reward(spec)
    fields = {"dpo": ("beta",), "orpo": ("beta",), "kto": tuple(type(preference).model_fields)}.get(used, ())
    for name, field in type(preference).model_fields.items():
        if name not in fields and (value := getattr(preference, name)) != field.default:
            needed = "kto" if fields else "dpo, orpo or kto"
            yield Problem(
                f"training.preference.{name}",
                value,
                f"is not used by the objective {used} (data.kind: {kind})",
                f"remove it, or use training.objective: {needed}",
            )
    yield from _check_distillation(spec, used)
    if kind not in ("preferences", "unpaired"):
        return
    if spec.model.init_from is None and used not in ("orpo", "reward"):
        yield Problem(
            "model.init_from", None, "is missing, and preferences are measured against those weights", "name them"
        )
    yield from _plain_layout(spec, "does not support preferences", "another data.kind")


NF4_BLOCK = 64  # as in holdfast.model.nf4


def _check_distillation(spec: Spec, objective: str) -> Iterator[Problem]:
    """A distillation has a teacher, the torch engine, and a whole or sharded model; nothing else has a teacher."""
    distillation = spec.training.distillation
    if objective == "distillation":
        if distillation.teacher is None:
            yield Problem("training.distillation.teacher", None, "is missing", "name the folder of an exported model")
        if spec.training.precision == "fp8":
            yield Problem("training.precision", "fp8", "is not supported with a teacher", "use bf16")
        yield from _plain_layout(spec, "does not support distillation", "another training.objective")
        return
    for name, field in type(distillation).model_fields.items():
        if (value := getattr(distillation, name)) != field.default:
            yield Problem(
                f"training.distillation.{name}",
                value,
                f"is not used by the objective {objective}",
                "remove it, or use training.objective: distillation",
            )


def _check_reward(spec: Spec) -> Iterator[Problem]:
    """A reward model trains its head, writes no text, and is of a family with such a class in `transformers`."""
    if spec.model.family not in SCALAR_FAMILIES:
        yield Problem(
            "model.family",
            spec.model.family,
            "has no class for a scalar head in transformers",
            f"use {', '.join(SCALAR_FAMILIES)}",
        )
    for field, value, reason in (
        ("training.lora.rank", spec.training.lora.rank, "would not train the scalar head"),
        ("evaluation.tasks", spec.evaluation.tasks, "need a model that predicts tokens"),
        ("evaluation.prompts", spec.evaluation.prompts, "need a model that predicts tokens"),
    ):
        if value:
            yield Problem(field, None, f"{reason} (training.objective: reward)", "remove it")


def check_adapters(spec: Spec) -> Iterator[Problem]:
    """Adapters need weights to start from, and a dense model that is whole or sharded. Without a rank no other field of
    `training.lora` is set."""
    lora, fields = spec.training.lora, type(spec.training.lora).model_fields
    if lora.rank is None:
        for name in ("alpha", "rslora", "targets", "base"):
            if getattr(lora, name) != fields[name].default:
                remedy = "give training.lora.rank, or remove it"
                yield Problem(f"training.lora.{name}", getattr(lora, name), "is not used without a rank", remedy)
        return
    if spec.model.init_from is None:
        yield Problem(
            "model.init_from",
            None,
            "is missing, and training.lora trains adapters for those weights",
            "name them, or remove training.lora",
        )
    if len(set(lora.targets)) < len(lora.targets):
        yield Problem("training.lora.targets", lora.targets, "names a matrix twice", "name each once")
    absent = (
        {"k_proj", "v_proj", *(["q_proj"] if spec.model.latent.query else [])} if spec.model.preset.latent else set()
    )
    if missing := [name for name in lora.targets if name in absent]:
        existing = ", ".join(name for name in fields["targets"].default if name not in absent)
        message = f"names matrices that model.family: {spec.model.family} does not have"
        yield Problem("training.lora.targets", missing, message, f"use some of {existing}")
    if lora.base == "nf4":
        model = spec.model
        widths = {"hidden": model.hidden, "ffn": model.ffn_width, "heads": model.heads * model.head_width}
        for name, width in widths.items():
            if width % NF4_BLOCK:
                remedy = f"use a multiple of {NF4_BLOCK}, or training.lora.base: bf16"
                message = f"gives matrices of {width} columns, and NF4 scales {NF4_BLOCK} together (training.lora.base)"
                yield Problem(f"model.{name}", getattr(model, name), message, remedy)
        if spec.parallel.tensor > 1:
            remedy = "use bf16, or parallel.strategy: fsdp without parallel.tensor"
            message = f"is held whole by every rank, and parallel.tensor = {spec.parallel.tensor} would split it"
            yield Problem("training.lora.base", "nf4", message, remedy)
    yield from _dense_of_torch(spec, "does not support adapters", "no training.lora")


def _plain_layout(spec: Spec, why: str, otherwise: str) -> Iterator[Problem]:
    """The model is dense, whole or sharded, and the engine is torch. Everything else is refused with `why`."""
    yield from _dense_of_torch(spec, why, otherwise)
    for name in ("tensor", "pipeline", "context"):
        if (degree := getattr(spec.parallel, name)) > 1:
            remedy = f"use 1, with parallel.strategy: fsdp for a model that is too large, or {otherwise}"
            yield Problem(f"parallel.{name}", degree, why, remedy)


def _dense_of_torch(spec: Spec, why: str, otherwise: str) -> Iterator[Problem]:
    """The model is dense, and the engine is torch. Everything else is refused with `why`."""
    if spec.model.experts > 1:
        yield Problem("model.experts", spec.model.experts, why, f"use 1, or {otherwise}")
    if spec.parallel.engine != "torch":
        remedy = f"use ddp or fsdp, or {otherwise}"
        yield Problem("parallel.strategy", spec.parallel.strategy, why, remedy)


# Rules of `training.precision`: what each arithmetic supports. The support of the accelerator is checked on it.

FP8_CAPABILITY = (8, 9)  # the lowest CUDA capability with fp8 products: Ada; Hopper is 9.0
FP8_UNIT = 16  # fp8 kernels need matrices whose sides are multiples of it


def check_precision(spec: Spec) -> Iterator[Problem]:
    """Only the torch engine supports fp16, and only fp16 scales the loss."""
    training = spec.training
    if training.precision == "fp16" and spec.parallel.engine != "torch":
        yield Problem(
            "training.precision",
            "fp16",
            f"is not supported with parallel.strategy: {spec.parallel.strategy}, because no other engine can resume "
            "from the state of its loss scaler",
            "use bf16, or parallel.strategy: ddp or fsdp",
        )
    if training.precision != "fp16" and training.loss_scale != type(training.loss_scale)():
        yield Problem(
            "training.loss_scale",
            None,
            f"has no effect with training.precision: {training.precision}",
            "remove it, or use training.precision: fp16",
        )


def check_fp8(spec: Spec) -> Iterator[Problem]:
    """fp8 needs NVIDIA accelerators, and whole and dense matrices of the torch engine."""
    if spec.training.precision != "fp8":
        return
    parallel, training, other = spec.parallel, spec.training, "or training.precision: bf16"
    unable: tuple[tuple[str, object, bool, str, str], ...] = (
        (
            "cluster.accelerator",
            spec.cluster.accelerator,
            spec.cluster.accelerator != "nvidia",
            "does not support fp8 products here",
            "use nvidia (Ada, Hopper, Blackwell)",
        ),
        (
            "parallel.strategy",
            parallel.strategy,
            parallel.engine != "torch",
            "does not support fp8 here",
            "use ddp or fsdp",
        ),
        (
            "parallel.tensor",
            parallel.tensor,
            parallel.tensor > 1,
            "splits matrices, and each rank would scale its part separately",
            "use 1",
        ),
        (
            "parallel.schedule",
            parallel.schedule,
            parallel.schedule == "zero_bubble",
            "computes the two gradients of a product separately, and in fp8 they are one operation",
            "use 1f1b",
        ),
        (
            "model.experts",
            spec.model.experts,
            spec.model.experts > 1,
            "are multiplied in groups, which do not support fp8 here",
            "use 1",
        ),
        (
            "training.lora.rank",
            training.lora.rank,
            training.lora.rank is not None,
            "creates matrices that are too thin for fp8",
            "remove it",
        ),
        (
            "data.kind",
            spec.data.kind,
            spec.data.kind in ("preferences", "unpaired"),
            "measures small differences between two models, which are not tested in fp8",
            "use another kind",
        ),
    )
    for field, value, is_used, message, remedy in unable:
        if is_used:
            yield Problem(field, value, f"{message} (training.precision: fp8)", f"{remedy}, {other}")
    yield from _sides_fit(spec, other)


def _sides_fit(spec: Spec, other: str) -> Iterator[Problem]:
    model, tokens = spec.model, spec.training.micro_batch * spec.model.context // max(1, spec.parallel.context)
    sides = (
        ("model.hidden", model.hidden, model.hidden, "the residual stream"),
        ("model.ffn", model.ffn_width, model.ffn_width, "the feed-forward layer"),
        ("model.heads", model.heads, model.heads * model.head_width, "the queries"),
        ("model.kv_heads", model.key_value_heads, model.key_value_heads * model.head_width, "the keys"),
        ("model.context", model.context, tokens, "a micro-batch, in tokens of one rank,"),
    )
    for field, value, side, matrix in sides:
        if side % FP8_UNIT:
            yield Problem(
                field,
                value,
                f"makes {matrix} {side} wide, which is not a multiple of {FP8_UNIT} (training.precision: fp8)",
                f"change it, {other}",
            )


def check_own_objective(spec: Spec) -> Iterator[Problem]:
    """An objective of user code needs whole logits, and one loss for each target."""
    objective, parallel = spec.training.objective, spec.parallel
    if not objective.is_own:
        if objective.arguments != "{}" or objective.digest is not None:
            yield Problem("training.objective.use", None, "is missing", "name a function, such as mine.py:focal")
        return
    if objective.kind != "auto":
        remedy = "remove `kind`, or the function"
        yield Problem("training.objective.kind", objective.kind, "is not used with a function", remedy)
    if spec.data.kind not in ("text", "chat"):
        remedy = "use data.kind: text or chat"
        yield Problem("training.objective.use", objective.use, f"does not train on {spec.data.kind}", remedy)
    for name in ("tensor", "pipeline", "context"):
        if getattr(parallel, name) > 1:
            remedy = "use ddp or fsdp without it"
            value = getattr(parallel, name)
            yield Problem(f"parallel.{name}", value, "leaves no rank the logits for your own objective", remedy)
    if parallel.engine == "deepspeed":
        remedy = "use ddp or fsdp"
        yield Problem("parallel.strategy", parallel.strategy, "does not run your own objective", remedy)
    if spec.model.experts > 1 and spec.model.routing.balance == "auxiliary":
        remedy = "balance with a bias (model.routing.balance: bias), or use a built-in objective"
        yield Problem("model.routing.balance", "auxiliary", "is part of the built-in objectives only", remedy)
