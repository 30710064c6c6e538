"""Rules of `model`: its shape is possible, and `parallel` can split it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.spec.errors import Problem
from holdfast.spec.model import LEAST_HIDDEN, MIXTURES, Routing
from holdfast.spec.tree import Spec

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


def check_model_family(spec: Spec) -> Iterator[Problem]:
    """A field that only some families have is given only for them. Readers of other families would ignore it."""
    model = spec.model
    if model.sliding_window is not None and model.family not in ("mistral", "mixtral"):
        yield Problem(
            "model.sliding_window",
            model.sliding_window,
            f"is not part of model.family: {model.family}",
            "remove it, or use family: mistral or mixtral",
        )
    if model.head_dim is not None and model.family in ("qwen2", "qwen2_moe", "dots1"):
        yield Problem(
            "model.head_dim",
            model.head_dim,
            f"is not part of model.family: {model.family}, whose heads fill the width",
            f"remove it, or use family: {'qwen3' if model.family == 'qwen2' else 'qwen3_moe'}",
        )


def check_experts(spec: Spec) -> Iterator[Problem]:
    """Only a family with experts has them, there are enough for `top_k`, and the export supports the balancing."""
    model, routing, mixture = spec.model, spec.model.routing, spec.model.family in MIXTURES
    if mixture != (model.experts > 1):
        dense, mixtures = "mistral, qwen2, qwen3 or llama", " or ".join(MIXTURES)
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
    if (routing.shared > 0) != (model.family in ("qwen2_moe", "dots1")):
        yield Problem(
            "model.routing.shared",
            routing.shared,
            f"is not valid for model.family: {model.family}",
            "use 0" if routing.shared else "use 1 or more",
        )
    if model.family == "mixtral" and not routing.normalise:
        yield Problem("model.routing.normalise", False, "is not valid for model.family: mixtral", "use true")
    if routing.balance == "bias" and not model.biased_routing:
        yield Problem(
            "model.routing.balance",
            "bias",
            f"changes biases that weights of model.family: {model.family} do not have, so its export would choose "
            "different experts",
            "use auxiliary, or family: dots1",
        )


def check_rope(spec: Spec) -> Iterator[Problem]:
    """Fields for scaling of frequencies are given only for their kind, and the factor scales the frequencies."""
    scaling = spec.model.rope_scaling
    used = {"none": (), "linear": ("factor",)}.get(scaling.kind, tuple(type(scaling).model_fields))
    for name, info in type(scaling).model_fields.items():
        value = getattr(scaling, name)
        if name != "kind" and name not in used and value != info.default:
            yield Problem(
                f"model.rope_scaling.{name}",
                value,
                f"is not used by kind: {scaling.kind}",
                "remove it, or use kind: llama3" + (" or linear" if name == "factor" else ""),
            )
    if scaling.kind != "none" and scaling.factor <= 1:
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
