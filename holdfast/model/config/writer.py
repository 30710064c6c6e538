"""Writer of the config.json of a model. The file loads in `transformers` as the family's class."""

from typing import Any

from holdfast.model.config.families import (
    FAMILIES,
    LATENT_KEYS,
    LAYER_KINDS,
    MORE_KEYS,
    ROPE_KEYS,
    FamilyConfig,
)
from holdfast.spec.model import ROPE_FIELDS, Model, RopeScaling


def config(shape: Model, vocabulary: int, end_id: int) -> dict[str, Any]:
    """The config.json of a model whose documents end with the token `end_id`."""
    family = FAMILIES[shape.family]
    settings = {
        "architectures": [family.architecture],
        "attention_dropout": 0.0,
        "bos_token_id": end_id,
        "dtype": "float32",
        "eos_token_id": end_id,
        "head_dim": shape.head_width,
        family.activation[0]: family.activation[1],
        "hidden_size": shape.hidden,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.dense_width,
        "max_position_embeddings": shape.context,
        "model_type": shape.family,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,  # for readers older than transformers 5
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32",  # for readers older than transformers 5
        "use_cache": True,
        "vocab_size": vocabulary,
        **family.fixed,
        **_of_mixture(shape, family),
    }
    if shape.head == "scalar":
        settings["architectures"] = [family.scalar_architecture]
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one number
    return settings | _rope_keys(shape) | _keys_of_some(shape, family)


def _rope_keys(shape: Model) -> dict[str, Any]:
    """The config.json keys of positions."""
    scaling, theta = shape.rope_scaling, shape.rope_theta
    main = {"rope_theta": theta, **_rope(scaling)}
    if shape.preset.local_rope:
        local_theta = shape.rope_local_theta or theta
        local = {"rope_type": "default", "rope_theta": local_theta}
        return {"rope_parameters": {"full_attention": main, "sliding_attention": local}}
    if "rotary_fraction" in shape.preset.fields:
        main["partial_rotary_factor"] = shape.rotary_fraction
    keys: dict[str, Any] = {"rope_parameters": main}
    if "rotary_fraction" in shape.preset.fields:
        keys["partial_rotary_factor"] = shape.rotary_fraction
    if scaling.kind == "longrope":
        keys["original_max_position_embeddings"] = scaling.original_context
    elif scaling.kind != "none":
        keys["rope_scaling"] = _rope(scaling)  # for readers older than transformers 5
    return keys


def _keys_of_some(shape: Model, family: FamilyConfig) -> dict[str, Any]:
    """The config.json keys that only some families have."""
    preset, kinds = shape.preset, shape.layer_kinds
    keys: dict[str, Any] = {MORE_KEYS[field]: getattr(shape, field) for field in preset.fields if field in MORE_KEYS}
    if family.window:
        keys["sliding_window"] = shape.sliding_window
    if "query_scalar" in preset.fields:
        scalar = shape.query_scalar or shape.head_width
        keys["query_pre_attn_scalar"] = int(scalar) if float(scalar).is_integer() else scalar
    if "layer_pattern" in preset.fields:
        names = {kind: name for name, kind in LAYER_KINDS.items()}
        keys["layer_types"] = [names.get(kind, "full_attention") for kind in kinds]
    if "no_rope" in preset.pattern:
        keys["no_rope_layers"] = [int(kind != "no_rope") for kind in kinds]
    if preset.latent:
        latent = shape.latent
        keys |= {key: getattr(latent, field) for field, key in LATENT_KEYS.items()}
        keys |= {"q_lora_rank": latent.query or None, "qk_nope_head_dim": shape.head_width - latent.rope}
        keys["head_dim"] = latent.rope
    return {**keys, **family.written}


def _of_mixture(shape: Model, family: FamilyConfig) -> dict[str, Any]:
    """The config.json keys of the experts."""
    routing = shape.routing
    values: dict[str, Any] = {
        "experts": shape.experts,
        "ffn": shape.ffn_width,
        "routing.top_k": routing.top_k,
        "routing.normalise": routing.normalise,
        "routing.shared": routing.shared,
        "routing.groups": routing.groups,
        "routing.top_groups": routing.top_groups,
        "routing.scale": routing.scale,
        "dense_layers": shape.dense_layers,
        "dense_ffn": shape.dense_width,
    }
    config = {key: values[field] for field, key in family.mixture.items()}
    if shape.preset.shared == "weighted":
        config["shared_expert_intermediate_size"] = routing.shared * shape.ffn_width
    return config


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    kind = "default" if scaling.kind == "none" else scaling.kind
    values = {ROPE_KEYS[field]: getattr(scaling, field) for field in ROPE_FIELDS[scaling.kind]}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind, **{key: value for key, value in values.items() if value is not None}}
