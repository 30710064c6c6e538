"""The fields of a spec that weights determine."""

from holdfast.model.config.families import LATENT_KEYS
from holdfast.spec.errors import Problem
from holdfast.spec.model import ROPE_FIELDS, Model


def fixed_fields(shape: Model, weights: Model | None = None) -> dict[str, object]:
    """The fields of a spec that weights determine, with their defaults resolved. The weights' model selects the fields.
    By default it is the model itself."""
    weights = weights or shape
    scaling, groups = shape.rope_scaling, weights.preset.dense_first
    some: dict[str, object] = {
        "rope_local_theta": shape.rope_local_theta or shape.rope_theta,
        "rotary_fraction": shape.rotary_fraction,
        "layer_pattern": list(shape.layer_kinds),
        "query_scalar": shape.query_scalar or shape.head_width,
        "attention_bias": shape.attention_bias,
        "query_key_norm": shape.query_key_norm,
    }
    routing: dict[str, object] = {
        "top_k": shape.routing.top_k,
        "normalise": shape.normalised,
        "shared": shape.routing.shared,
    }
    if groups:
        routing |= {field: getattr(shape.routing, field) for field in ("groups", "top_groups", "scale")}
    return {
        "family": shape.family,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.key_value_heads,
        "head_dim": shape.head_width,
        "ffn": shape.ffn_width,
        "rope_theta": shape.rope_theta,
        "rope_scaling.kind": scaling.kind,
        **{f"rope_scaling.{field}": getattr(scaling, field) for field in ROPE_FIELDS[weights.rope_scaling.kind]},
        "sliding_window": shape.sliding_window,
        **{field: some[field] for field in weights.preset.fields if field in some},
        "norm_epsilon": shape.norm_epsilon,
        "tie_embeddings": shape.tie_embeddings,
        "experts": shape.experts,
        **({f"latent.{field}": getattr(shape.latent, field) for field in LATENT_KEYS} if weights.preset.latent else {}),
        **({"dense_layers": shape.dense_layers} if groups else {}),
        **({"dense_ffn": shape.dense_width} if weights.dense_layers else {}),
        **({f"routing.{field}": value for field, value in routing.items()} if shape.experts > 1 else {}),
    }


def problems_with_weights(shape: Model, weights: Model) -> list[Problem]:
    """The fields of a spec's model that differ from those of the weights of `model.init_from`."""
    expected, actual = fixed_fields(shape, weights), fixed_fields(weights)
    problems = [
        Problem(
            f"model.{field}",
            value,
            f"is {actual[field]!r} in the weights of model.init_from",
            f"write {field.rpartition('.')[2]}: {actual[field]}",
        )
        for field, value in expected.items()
        if value != actual[field]
    ]
    if weights.head == "scalar" and shape.head == "tokens" and not shape.tie_embeddings:
        message = "is not in the weights of model.init_from, which are a reward model"
        problems.append(Problem("model.head", shape.head, message, "write head: scalar, or use other weights"))
    return problems
