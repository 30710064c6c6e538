"""Rules of `model`: its shape is possible, and `parallel` can split it."""

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.families import DENSE_FIRST, MIXTURES, PRESETS
from holdfast.spec.model import LARGEST_HEAD, LEAST_HIDDEN, ROPE_FIELDS, Model, Routing, scaling_problem
from holdfast.spec.section import Section
from holdfast.spec.tree import Spec

# fields that only some families have (`Preset.fields`)
_FAMILY_FIELDS = tuple(sorted({field for preset in PRESETS.values() for field in preset.fields}))

# The nearest multiples of a unit, for remedies.


def nearest_multiples(value: int, unit: int, least: int = 1) -> str:
    """The multiples of `unit` below and above `value`, at least `least`, nearest first: "384 or 396"."""
    below = value // unit * unit
    choices = [choice for choice in (below, below + unit) if choice >= least]
    return " or ".join(str(choice) for choice in sorted(choices, key=lambda choice: abs(choice - value)))


def check_heads(spec: Spec) -> Iterator[Problem]:
    """The heads divide the width, key/value heads divide the heads, and the tensor degree divides both."""
    model, tensor = spec.model, spec.parallel.tensor
    even = nearest_multiples(model.hidden, 2 * model.heads, LEAST_HIDDEN)
    if model.hidden % model.heads and (model.head_dim is None or model.family == "llama"):  # as in transformers
        yield Problem("model.hidden", model.hidden, f"is not a multiple of model.heads = {model.heads}", f"use {even}")
    elif model.head_dim is not None and model.head_dim % 2:
        yield Problem(
            "model.head_dim",
            model.head_dim,
            "is odd, and rotary positions need pairs",
            f"use {nearest_multiples(model.head_dim, 2)}",
        )
    elif model.head_width % 2:
        yield Problem(
            "model.hidden",
            model.hidden,
            f"gives heads of odd width {model.head_width}, and rotary positions need pairs",
            f"use {even}",
        )
    if model.heads % model.key_value_heads:
        divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        yield Problem(
            "model.kv_heads", model.kv_heads, f"does not divide model.heads = {model.heads}", f"use one of {divisors}"
        )
    for field, heads in (("model.heads", model.heads), ("model.kv_heads", model.key_value_heads)):
        if heads % tensor:
            yield Problem(
                field,
                heads,
                f"is not divisible by parallel.tensor = {tensor}",
                f"use a multiple of {tensor}, or a smaller parallel.tensor",
            )


def check_attention_kernel(spec: Spec) -> Iterator[Problem]:
    """The flash kernel of CUDA, which computes attention in 16 bits, takes the width of the heads."""
    model, precision = spec.model, spec.training.precision
    width = max(model.head_width, model.value_width)
    if spec.cluster.accelerator not in ("nvidia", "amd") or precision == "fp32" or width <= LARGEST_HEAD:
        return
    field, value = ("model.hidden", model.hidden) if model.head_dim is None else ("model.head_dim", model.head_dim)
    if width > model.head_width:
        field, value = "model.latent.value", width
    yield Problem(
        field,
        value,
        f"gives heads of width {width}, and the flash kernel computes at most {LARGEST_HEAD} "
        f"with training.precision = {precision}",
        "use training.precision: fp32, or narrower heads",
    )


def check_model_family(spec: Spec) -> Iterator[Problem]:
    """A field that only some families have is given only for them. Readers of other families would ignore it."""
    model = spec.model
    for field in _FAMILY_FIELDS:
        value = getattr(model, field)
        if field in model.preset.fields or value == type(model).model_fields[field].get_default(
            call_default_factory=True
        ):
            continue
        families = [name for name, preset in PRESETS.items() if field in preset.fields]
        where = f"model.{field}"
        if isinstance(value, Section):
            plain = type(value)()
            changed = next(name for name in type(value).model_fields if getattr(value, name) != getattr(plain, name))
            where, value = f"{where}.{changed}", getattr(value, changed)
        yield Problem(
            where,
            value,
            f"is not part of model.family: {model.family}"
            + (", whose heads fill the width" if field == "head_dim" else ""),
            f"remove it, or use family: {' or '.join(families)}",
        )
    if "sliding" in model.layer_kinds and model.sliding_window is None:
        yield Problem(
            "model.sliding_window",
            None,
            f"is not given, and model.family: {model.family} has sliding layers",
            "give the window in tokens, or layer_pattern: [full]",
        )
    if model.rotary_fraction != 1 and (model.rotary_width % 2 or model.rotary_width < 2):
        yield Problem(
            "model.rotary_fraction",
            model.rotary_fraction,
            f"rotates {model.rotary_width} of {model.head_width}, and rotary positions need pairs",
            "use a fraction that gives an even number",
        )


def check_export_dtype(spec: Spec) -> Iterator[Problem]:
    """The type of a base needs one."""
    if spec.model.export_dtype == "base" and spec.model.init_from is None:
        remedy = "use fp32 or bf16, or name weights in model.init_from"
        yield Problem("model.export_dtype", "base", "is the type of weights that are not named", remedy)


def check_latent(spec: Spec) -> Iterator[Problem]:
    """Widths of attention with latents fit together."""
    model = spec.model
    if not model.preset.latent:
        return
    if model.latent.rope % 2 or model.latent.rope >= model.head_width:
        yield Problem(
            "model.latent.rope",
            model.latent.rope,
            f"is odd, or not less than the head's width {model.head_width} (model.head_dim)",
            f"use an even number below {model.head_width}, or a larger model.head_dim",
        )
    if model.key_value_heads != model.heads:
        yield Problem(
            "model.kv_heads",
            model.kv_heads,
            f"is not model.heads = {model.heads}, and every head has keys in model.family: {model.family}",
            "remove it",
        )


def check_experts(spec: Spec) -> Iterator[Problem]:
    """Only a family with experts has them, there are enough for `top_k`, and the export supports the balancing."""
    model, routing, mixture = spec.model, spec.model.routing, spec.model.family in MIXTURES
    yield from _check_dense_layers(model)
    if mixture != (model.experts > 1):
        dense = " or ".join(family for family in PRESETS if family not in MIXTURES)
        mixtures = " or ".join(MIXTURES)
        yield Problem(
            "model.experts",
            model.experts,
            f"is not valid for model.family: {model.family}",
            f"use 2 or more, or a dense family ({dense})" if mixture else f"use 1, or family: {mixtures}",
        )
        return
    if not mixture:
        if routing != Routing():
            field = next(
                name for name in type(routing).model_fields if getattr(routing, name) != getattr(Routing(), name)
            )
            yield Problem(
                f"model.routing.{field}",
                getattr(routing, field),
                "has no effect without model.experts",
                "remove it, or use a mixture of experts",
            )
        return
    if routing.top_k > model.experts:
        yield Problem(
            "model.routing.top_k",
            routing.top_k,
            f"is more than model.experts = {model.experts}",
            f"use at most {model.experts}",
        )
    if (routing.shared > 0) != (model.preset.shared != "none"):
        yield Problem(
            "model.routing.shared",
            routing.shared,
            f"is not valid for model.family: {model.family}",
            "use 0" if routing.shared else "use 1 or more",
        )
    if model.normalised and not routing.normalise:
        yield Problem("model.routing.normalise", False, f"is not valid for model.family: {model.family}", "use true")
    yield from _check_groups(model)
    if routing.balance == "bias" and not model.biased_routing:
        yield Problem(
            "model.routing.balance",
            "bias",
            f"changes biases that weights of model.family: {model.family} do not have, so its export would choose "
            "different experts",
            "use auxiliary, or family: dots1 or glm4_moe or deepseek_v3",
        )


def _check_groups(model: Model) -> Iterator[Problem]:
    """Fields of DeepSeek's router and of dense first layers: only for its families, and there are enough experts."""
    routing, plain = model.routing, Routing()
    if not model.preset.dense_first:
        for field in ("groups", "top_groups", "scale"):
            if getattr(routing, field) != getattr(plain, field):
                yield Problem(
                    f"model.routing.{field}",
                    getattr(routing, field),
                    f"is not part of model.family: {model.family}",
                    f"remove it, or use family: {' or '.join(DENSE_FIRST)}",
                )
    elif model.experts % routing.groups or model.experts // routing.groups < 2:
        yield Problem(
            "model.routing.groups",
            routing.groups,
            f"does not divide model.experts = {model.experts} into groups of 2 or more",
            f"use one of {[n for n in range(1, model.experts // 2 + 1) if model.experts % n == 0]}",
        )
    elif routing.top_groups > routing.groups or routing.top_groups * (model.experts // routing.groups) < routing.top_k:
        yield Problem(
            "model.routing.top_groups",
            routing.top_groups,
            f"of {routing.groups} groups has fewer experts than top_k = {routing.top_k}, or is more than groups",
            f"use {-(-routing.top_k * routing.groups // model.experts)} to {routing.groups}",
        )


def _check_dense_layers(model: Model) -> Iterator[Problem]:
    """Dense first layers exist only in a mixture that has them, and some layer has experts."""
    for field in ("dense_layers", "dense_ffn"):
        value = getattr(model, field)
        if not value:
            continue
        if not model.preset.dense_first:
            yield Problem(
                f"model.{field}",
                value,
                f"is not part of model.family: {model.family}",
                f"remove it, or use family: {' or '.join(DENSE_FIRST)}",
            )
        elif not model.dense_layers:
            yield Problem("model.dense_ffn", value, "has no effect without model.dense_layers", "remove it")
    if model.preset.dense_first and model.dense_layers >= model.layers:
        yield Problem(
            "model.dense_layers",
            model.dense_layers,
            f"leaves no layer with experts of model.layers = {model.layers}",
            f"use at most {model.layers - 1}",
        )


def check_rope(spec: Spec) -> Iterator[Problem]:
    """Fields for scaling of frequencies are given only for their kind, and the factor scales the frequencies."""
    scaling = spec.model.rope_scaling
    used = ROPE_FIELDS[scaling.kind]
    for name, info in type(scaling).model_fields.items():
        value = getattr(scaling, name)
        if name != "kind" and name not in used and value != info.default:
            yield Problem(
                f"model.rope_scaling.{name}",
                value,
                f"is not used by kind: {scaling.kind}",
                f"remove it, or use kind: {' or '.join(kind for kind in ROPE_FIELDS if name in ROPE_FIELDS[kind])}",
            )
    if scaling.score_factor and not spec.model.preset.latent:
        families = " or ".join(name for name, preset in PRESETS.items() if preset.latent)
        yield Problem(
            "model.rope_scaling.score_factor",
            scaling.score_factor,
            f"is not part of model.family: {spec.model.family}, whose readers would not scale scores",
            f"remove it, or use family: {families}",
        )
    if problem := scaling_problem(spec.model):
        name, value, message, remedy = problem
        yield Problem("model." + ("" if name == "rope_theta" else "rope_scaling.") + name, value, message, remedy)
    if scaling.kind == "longrope":
        yield from _check_longrope(spec.model)
    elif scaling.kind != "none" and scaling.factor <= 1:
        yield Problem(
            "model.rope_scaling.factor",
            scaling.factor,
            f"scales nothing, and kind is {scaling.kind}",
            "use a factor above 1, or kind: none",
        )
    if scaling.kind == "llama3" and scaling.high_frequency_factor <= scaling.low_frequency_factor:
        yield Problem(
            "model.rope_scaling.high_frequency_factor",
            scaling.high_frequency_factor,
            f"is not above low_frequency_factor = {scaling.low_frequency_factor}",
            f"use a number above {scaling.low_frequency_factor}",
        )


def _check_longrope(model: Model) -> Iterator[Problem]:
    """Phi's scaling: a divisor for each frequency."""
    if not model.preset.longrope:
        yield Problem(
            "model.rope_scaling.kind", "longrope", f"is not part of model.family: {model.family}", "use family: phi3"
        )
    for field in ("short_factors", "long_factors"):
        count = len(getattr(model.rope_scaling, field))
        if count != model.rotary_width // 2:
            yield Problem(
                f"model.rope_scaling.{field}",
                f"{count} numbers",
                f"is not one number for each of the {model.rotary_width // 2} frequencies",
                f"give {model.rotary_width // 2}, those of config.json",
            )


def check_stage_count(spec: Spec) -> Iterator[Problem]:
    """Every pipeline stage has a layer."""
    per_rank = 2 if spec.parallel.schedule == "interleaved" else 1
    if spec.parallel.pipeline > max(1, spec.model.layers // per_rank):
        yield Problem(
            "parallel.pipeline",
            spec.parallel.pipeline,
            f"x {per_rank} stages is more than model.layers = {spec.model.layers}",
            f"use at most {spec.model.layers // per_rank}",
        )
