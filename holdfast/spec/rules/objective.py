"""Rules of `training.objective`: it fits the data, the head, the weights and the layout. Rules of adapters."""

from collections.abc import Iterator, Mapping

from holdfast.spec.errors import Problem
from holdfast.spec.families import SCALAR_HEADS
from holdfast.spec.rules.parallel import GROUPED_BYTES
from holdfast.spec.training import ObjectiveName
from holdfast.spec.tree import Spec

# The objectives of each kind of data; the first is that of `training.objective: auto`.
OBJECTIVES: Mapping[str, tuple[ObjectiveName, ...]] = {
    "text": ("next_token", "distillation"),
    "chat": ("next_token", "distillation"),
    "preferences": ("dpo", "orpo", "reward"),
    "unpaired": ("kto",),
    "prompts": ("grpo",),
}


def objective_name(spec: Spec) -> ObjectiveName:
    """The objective of a spec: the one that it names, or that of its head and data."""
    named = spec.training.objective.kind
    if named == "auto" and spec.model.head == "scalar":
        return "reward"
    return OBJECTIVES[spec.data.kind][0] if named == "auto" else named


def check_preferences(spec: Spec) -> Iterator[Problem]:
    """The objective fits the data. Preferences need reference weights (except orpo) and the torch engine."""
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
    if kind not in ("preferences", "unpaired", "prompts"):
        return
    if spec.model.init_from is None and used not in ("orpo", "reward", "grpo"):
        yield Problem(
            "model.init_from", None, "is missing, and preferences are measured against those weights", "name them"
        )
    yield from _of_torch(spec, f"does not support {kind}", "another data.kind")


NF4_BLOCK = 64  # as in holdfast.model.nf4


def _check_distillation(spec: Spec, objective: str) -> Iterator[Problem]:
    """A distillation has a teacher and the torch engine; nothing else has a teacher."""
    distillation = spec.training.distillation
    if objective == "distillation":
        if distillation.teacher is None:
            yield Problem("training.distillation.teacher", None, "is missing", "name the folder of an exported model")
        if spec.training.precision == "fp8":
            yield Problem("training.precision", "fp8", "is not supported with a teacher", "use bf16")
        yield from _of_torch(spec, "does not support distillation", "another training.objective")
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
    if not spec.model.preset.scalar_head:
        yield Problem(
            "model.family",
            spec.model.family,
            "has no class for a scalar head in transformers",
            f"use {', '.join(SCALAR_HEADS)}",
        )
    for field, value, reason in (
        ("evaluation.tasks", spec.evaluation.tasks, "need a model that predicts tokens"),
        ("evaluation.prompts", spec.evaluation.prompts, "need a model that predicts tokens"),
    ):
        if value:
            yield Problem(field, None, f"{reason} (training.objective: reward)", "remove it")


def check_adapters(spec: Spec) -> Iterator[Problem]:
    """Adapters need weights to start from, and the torch engine. Without a rank no other field of `training.lora` is
    set."""
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
        yield from _check_nf4(spec)
    if spec.model.experts > 1:
        yield from _check_adapted_experts(spec)
    yield from _of_torch(spec, "does not support adapters", "no training.lora")


def _check_nf4(spec: Spec) -> Iterator[Problem]:
    """The widths of all frozen matrices are whole blocks, also of the columns that each rank of a tensor-parallel group
    holds."""
    model, tensor = spec.model, spec.parallel.tensor
    widths = {"hidden": model.hidden, "ffn": model.ffn_width, "heads": model.heads * model.head_width}
    if model.dense_layers:
        widths["dense_ffn"] = model.dense_width
    if model.preset.latent:
        del widths["heads"]
        widths |= {"latent.query": model.latent.query, "latent.key_value": model.latent.key_value}
        widths["latent.value"] = model.heads * model.value_width
    for name, width in widths.items():
        if width % NF4_BLOCK:
            remedy = f"use a multiple of {NF4_BLOCK}, or training.lora.base: bf16"
            message = f"gives matrices of {width} columns, and NF4 scales {NF4_BLOCK} together (training.lora.base)"
            section, _, field = name.rpartition(".")
            yield Problem(f"model.{name}", getattr(model.latent if section else model, field), message, remedy)
    columns = {"the output of attention": model.heads * model.value_width}
    if model.experts == 1:
        columns["the feed-forward layers"] = model.ffn_width
    elif model.routing.shared:
        columns["the shared experts"] = model.routing.shared * model.ffn_width
    if model.dense_layers:
        columns["the dense layers"] = model.dense_width
    for matrix, width in columns.items():
        if width % NF4_BLOCK == 0 and width % (NF4_BLOCK * tensor):
            message = (
                f"gives each rank {width / tensor:g} of the {width} columns of {matrix}, and NF4 scales {NF4_BLOCK} "
                "together (training.lora.base)"
            )
            blocks = width // NF4_BLOCK
            remedy = f"use {f'a divisor of {blocks}' if blocks > 1 else 1}, or training.lora.base: bf16"
            yield Problem("parallel.tensor", tensor, message, remedy)


def _check_adapted_experts(spec: Spec) -> Iterator[Problem]:
    """Gate and up of an expert are one matrix with one adapter. The router is not trained."""
    lora, unit = spec.training.lora, GROUPED_BYTES // (4 if spec.training.precision == "fp32" else 2)
    if ("gate_proj" in lora.targets) != ("up_proj" in lora.targets):
        message = "names one of gate_proj and up_proj, which are one matrix in experts"
        yield Problem("training.lora.targets", list(lora.targets), message, "name both, or none of them")
    elif {"gate_proj", "down_proj"} & set(lora.targets) and lora.rank is not None and lora.rank % unit:
        message = (
            f"makes rows in {spec.training.precision} that are not a multiple of {GROUPED_BYTES} bytes, which the "
            "products of experts need"
        )
        remedy = f"use a multiple of {unit}, or training.lora.targets without gate_proj, up_proj and down_proj"
        yield Problem("training.lora.rank", lora.rank, message, remedy)
    if spec.model.routing.balance == "bias":
        message = "changes biases of the weights, which training.lora leaves alone"
        yield Problem("model.routing.balance", "bias", message, "use none, or auxiliary")


def _of_torch(spec: Spec, why: str, otherwise: str) -> Iterator[Problem]:
    """The engine is torch. DeepSpeed's are refused with `why`."""
    if spec.parallel.engine != "torch":
        remedy = f"use ddp or fsdp, or {otherwise}"
        yield Problem("parallel.strategy", spec.parallel.strategy, why, remedy)


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
