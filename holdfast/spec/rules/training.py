"""Rules of `training` and `checkpoint`: local tiers, the schedule, the optimizer, compression, anomalies, precision.

Each rule checks that the settings work together and with the model and the layout. For fp16 and fp8, it refuses the
fields that the precision does not support. The accelerator's capability is not known here: a rank checks it when it
starts.
"""

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.training import KEEPING, MuonSettings, ParameterGroup, Schedule
from holdfast.spec.tree import Spec

FP8_CAPABILITY = (8, 9)  # the lowest CUDA capability with fp8 products: Ada; Hopper is 9.0
FP8_UNIT = 16  # fp8 kernels need matrices whose sides are multiples of it


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
    """LAMB needs norms of whole tensors, and Muon whole matrices. The torch engine has them if every rank has a part of
    every tensor."""
    parallel, optimizer = spec.parallel, spec.training.optimizer
    if optimizer.build is not None:
        yield from _own_optimizer_problems(spec)
        return
    if optimizer.kind != "muon":
        remedy = "remove it, or use training.optimizer.kind: muon"
        if optimizer.muon != MuonSettings():
            yield Problem("training.optimizer.muon", None, f"is not used with kind: {optimizer.kind}", remedy)
        for index, group in enumerate(optimizer.groups):
            if group.adamw:
                field, message = f"training.optimizer.groups[{index}].adamw", f"is not used with kind: {optimizer.kind}"
                yield Problem(field, True, message, remedy)
    elif spec.training.lora.rank is not None:
        message = "does not train adapters (training.lora), which are thin"
        yield Problem("training.optimizer.kind", "muon", message, "use adamw, or remove training.lora")
    if optimizer.kind == "adamw":
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
                optimizer.kind,
                f"is not supported with parallel.{field}: {value}",
                "use adamw, or parallel.strategy: ddp or fsdp without pipeline and offload",
            )


def _own_optimizer_problems(spec: Spec) -> Iterator[Problem]:
    """An optimizer of user code updates whole parameters or their shards. Its settings are its arguments."""
    parallel, optimizer = spec.parallel, spec.training.optimizer
    for name in ("kind", "beta1", "beta2", "epsilon", "muon"):
        value = getattr(optimizer, name)
        if value != type(optimizer).model_fields[name].get_default(call_default_factory=True):
            remedy = "give it to the function, next to use"
            yield Problem(f"training.optimizer.{name}", value, "is not used by training.optimizer.build", remedy)
    for index, group in enumerate(optimizer.groups):
        if group.adamw:
            message = "is not used by training.optimizer.build"
            yield Problem(f"training.optimizer.groups[{index}].adamw", True, message, "remove it")
    assert optimizer.build is not None
    unable = {
        "parallel.strategy": parallel.strategy if parallel.engine == "deepspeed" else None,
        "parallel.tensor": parallel.tensor if parallel.tensor > 1 else None,
        "parallel.pipeline": parallel.pipeline if parallel.pipeline > 1 else None,
        "parallel.expert": parallel.expert if parallel.expert > 1 else None,
        "parallel.offload": parallel.offload if parallel.offload != "none" else None,
        "training.determinism": "elastic" if spec.training.determinism == "elastic" else None,
    }
    for field, value in unable.items():
        if value is not None:
            message, remedy = f"is not supported with {field}: {value}", "use ddp or fsdp, or a built-in optimizer"
            yield Problem("training.optimizer.build", optimizer.build.use, message, remedy)


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
    schedule, defaults = spec.training.schedule, Schedule()
    unused: dict[str, str] = {}
    if schedule.kind != "wsd":
        unused |= dict.fromkeys(("decay_steps", "decay_shape"), f"is not used with kind: {schedule.kind}")
    if schedule.kind == "inverse_sqrt":
        unused["final_ratio"] = "is not used with kind: inverse_sqrt"
    if schedule.factor is not None:
        names = ("kind", "warmup_steps", "final_ratio", "decay_steps", "decay_shape")
        unused = dict.fromkeys(names, "is not used with a factor of your own")
    for name, message in unused.items():
        if (value := getattr(schedule, name)) != getattr(defaults, name):
            yield Problem(f"training.schedule.{name}", value, message, "remove it")
    if schedule.factor is not None:
        return
    if schedule.kind == "inverse_sqrt" and not schedule.warmup_steps:
        message = "is the scale of kind: inverse_sqrt, and is missing"
        yield Problem("training.schedule.warmup_steps", 0, message, "use at least 1, such as 1% of training.steps")
    if schedule.kind == "wsd":
        yield from _check_decay(spec)


def _check_decay(spec: Spec) -> Iterator[Problem]:
    """The decay of `wsd` begins after the warm-up."""
    field, schedule, most = "training.schedule.decay_steps", spec.training.schedule, spec.training.steps - 1
    if schedule.decay_steps is None:
        yield Problem(field, None, "is required by kind: wsd", "add it, such as 10% of training.steps")
    elif schedule.decay_steps > most - schedule.warmup_steps:
        message = f"leaves no room after {schedule.warmup_steps} steps of warm-up in {spec.training.steps} steps"
        yield Problem(field, schedule.decay_steps, message, f"use at most {max(1, most - schedule.warmup_steps)}")


def check_ema(spec: Spec) -> Iterator[Problem]:
    """An average of the weights needs a decay and the torch engine."""
    ema = spec.training.ema
    if ema.decay is None:
        if ema.export:
            yield Problem("training.ema.export", True, "has no average to export", "give training.ema.decay")
        return
    if spec.parallel.engine != "torch":
        message = f"is not supported with parallel.strategy: {spec.parallel.strategy}"
        yield Problem("training.ema.decay", ema.decay, message, "use parallel.strategy: ddp or fsdp")


def check_parameter_groups(spec: Spec) -> Iterator[Problem]:
    """Groups need the torch engine. Only whole weights of a model without stages can be frozen."""
    field, parallel = "training.optimizer.groups", spec.parallel
    for index, group in enumerate(spec.training.optimizer.groups):
        if parallel.engine != "torch":
            message = f"is not supported with parallel.strategy: {parallel.strategy}"
            yield Problem(f"{field}[{index}].match", group.match, message, "use parallel.strategy: ddp or fsdp")
        if group == ParameterGroup(match=group.match):
            message = "has no settings"
            yield Problem(f"{field}[{index}].match", group.match, message, "give rate_factor, weight_decay or frozen")
        if not group.frozen:
            continue
        if spec.training.lora.rank is not None:
            message = "would freeze an adapter; the weights are frozen already (training.lora)"
            yield Problem(f"{field}[{index}].frozen", True, message, "use fewer training.lora.targets")
        if parallel.pipeline > 1:
            message = f"is not supported with parallel.pipeline = {parallel.pipeline}"
            yield Problem(f"{field}[{index}].frozen", True, message, "use parallel.strategy: fsdp without stages")


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
