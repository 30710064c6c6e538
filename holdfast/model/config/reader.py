"""Reader of the config.json of the supported model families.

Settings that `transformers` would compute differently are refused by key.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from holdfast.model.config.base import OWN
from holdfast.model.config.families import (
    FAMILIES,
    LATENT_KEYS,
    LAYER_KINDS,
    MORE_KEYS,
    MORE_LAYERS,
    ROPE_KEYS,
    ROPE_OPTIONAL,
    SHAPE_KEYS,
    FamilyConfig,
)
from holdfast.spec.errors import DataError, shown
from holdfast.spec.families import PRESETS, LayerKind
from holdfast.spec.model import MOST_LAYERS, ROPE_FIELDS, Model, scaling_problem

MOST_EXPERTS = 1_000_000  # over all layers; each has separate tensors
MOST_INTEGER = 2**31 - 1
MOST_FLOAT = 1e300
# The types of the keys that are read. Missing keys and null are handled where they are used.
_INTEGER, _NUMBER, _FLAG = "an integer", "a number", "true or false"
_TEXT, _TEXTS, _OBJECT = "text", "a list of texts", "an object"
_INTEGERS, _NUMBERS = "a list of integers", "a list of numbers"
_LISTS = {_TEXTS: _TEXT, _INTEGERS: _INTEGER, _NUMBERS: _NUMBER}
_TYPES: dict[str, str] = {
    key: kind
    for kind, keys in {
        _INTEGER: """
            num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim
            intermediate_size max_position_embeddings vocab_size sliding_window moe_intermediate_size
            shared_expert_intermediate_size num_experts num_local_experts num_experts_per_tok
            n_routed_experts n_shared_experts n_group topk_group first_k_dense_replace num_nextn_predict_layers
            q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim
            no_rope_layer_interval sliding_window_pattern original_max_position_embeddings
        """,
        _NUMBER: """
            rms_norm_eps initializer_range rope_theta partial_rotary_factor rope_local_base_freq query_pre_attn_scalar
            routed_scaling_factor
        """,
        _FLAG: "tie_word_embeddings norm_topk_prob use_qk_norm",
        _TEXT: "model_type hidden_act hidden_activation",
        _TEXTS: "architectures layer_types",
        _INTEGERS: "no_rope_layers",
        _OBJECT: "rope_scaling rope_parameters id2label quantization_config compression_config",
    }.items()
    for key in keys.split()
}
_ROPE_TYPES: dict[str, str] = {
    key: kind
    for kind, keys in {
        _TEXT: "rope_type type",
        _NUMBER: """
            rope_theta factor low_freq_factor high_freq_factor partial_rotary_factor beta_fast beta_slow
            attention_factor mscale mscale_all_dim
        """,
        _INTEGER: "original_max_position_embeddings",
        _FLAG: "truncate",
        _NUMBERS: "short_factor long_factor",
    }.items()
    for key in keys.split()
}


def _is(kind: str, value: Any) -> bool:
    if kind == _INTEGER:
        return type(value) is int and -MOST_INTEGER <= value <= MOST_INTEGER
    if kind == _NUMBER:
        return type(value) in (int, float) and abs(value) <= MOST_FLOAT  # also false for NaN
    if kind == _FLAG:
        return isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str)
    if kind in _LISTS:
        return isinstance(value, list) and all(_is(_LISTS[kind], item) for item in value)
    return isinstance(value, dict)


def _require_types(path: str, settings: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Raises DataError for a key whose value has another type than readers of config.json expect."""
    for key, kind in types.items():
        if (value := settings.get(key)) is not None and not _is(kind, value):
            raise DataError(f"{path}: {key} is {shown(value)}; {kind} is needed")


_QUANTIZED = ("quantization_config", "compression_config")
# Of the published code of deepseek_v3, which `transformers` does not read.
_OF_DEEPSEEK = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class ReadConfig(NamedTuple):
    """The content of a config.json."""

    shape: Model
    vocabulary: int
    end_of_text: (
        int | None
    )  # in an export of Holdfast the end of documents; otherwise eos_token_id, the first of several
    stops: tuple[int, ...] = ()  # all of eos_token_id
    more_layers: int = 0  # after those of the model, for other purposes (multi-token prediction); they are not read


def read_config(path: str, settings: Mapping[str, Any]) -> ReadConfig:
    """The model that a config.json (`settings`, from `path`) describes. Raises DataError with the wrong key."""
    settings = _of_text(path, settings)
    _require_types(path, settings, _TYPES)
    for section in ("rope_scaling", "rope_parameters"):
        rope = settings.get(section) or {}
        _require_types(f"{path}: {section}", rope, {**_ROPE_TYPES, **dict.fromkeys(LAYER_KINDS, _OBJECT)})
        for kind in LAYER_KINDS:
            _require_types(f"{path}: {section}.{kind}", rope.get(kind) or {}, _ROPE_TYPES)
    name, family = _family(path, settings)
    only = {"attention_dropout": 0.0, **(_OF_DEEPSEEK if name == "deepseek_v3" else {})}
    for key, required in {**dict([family.activation]), **family.fixed, **only}.items():
        if settings.get(key) not in (required, None):
            is_noise = type(required) is float and required == 0  # of training, such as dropout
            remedy = f"set it to {required!r} to train without it" if is_noise else "use another model"
            raise DataError(f"{path}: {key} is {shown(settings[key])}; only {required!r} can be read; {remedy}")
    _refuse_quantized(path, name, settings)
    count = {}
    if "experts" in family.mixture and "num_local_experts" in settings:  # the key of transformers 5
        count[family.mixture["experts"]] = settings["num_local_experts"]
    settings = {**family.absent, **count, **settings}
    shape = _shape(path, name, settings)
    vocabulary = settings.get("vocab_size", 32000)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise DataError(f"{path}: vocab_size is {shown(vocabulary)}; a positive number is needed")
    ends = settings.get("eos_token_id")
    stops = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    if not all(_is(_INTEGER, stop) for stop in stops):
        raise DataError(f"{path}: eos_token_id is {shown(ends)}; {_INTEGER} is needed")
    end_of_text = _own(path, settings).get("end_of_text_id", stops[0] if stops else None)
    more_layers = settings.get(MORE_LAYERS) or 0 if MORE_LAYERS in family.written else 0
    return ReadConfig(shape, vocabulary, end_of_text, stops, more_layers)


def _refuse_quantized(path: str, family: str, settings: Mapping[str, Any]) -> None:
    """Raises DataError for a section of quantized weights, also without the name of its method, as in old ones."""
    for key in _QUANTIZED:
        section = settings.get(key) or {}
        method = section.get("quant_method")
        if section and (key, family, method) != ("quantization_config", "gpt_oss", "mxfp4"):
            where, value = (key, section) if method is None else (f"{key}.quant_method", method)
            raise DataError(
                f"{path}: {where} is {shown(value)}; only weights of 16 and 32 bits can be read, and mxfp4 of gpt_oss; "
                "use weights that are not quantized (training.lora.base: nf4 stores those in 4 bits)"
            )


def _of_text(path: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model of a model that also sees images (Gemma 3)."""
    if settings.get("model_type") != "gemma3":
        return settings
    own = settings.get("text_config") or {}
    if not isinstance(own, dict):
        raise DataError(f"{path}: text_config is {shown(own)}; an object is needed")
    of_both = {key: settings[key] for key in ("eos_token_id", "tie_word_embeddings", "dtype", OWN) if key in settings}
    quantized = {key: settings[key] for key in _QUANTIZED if settings.get(key)}
    return {**of_both, **own, **quantized, "model_type": "gemma3_text", "architectures": None}


def _family(path: str, settings: Mapping[str, Any]) -> tuple[str, FamilyConfig]:
    names = {family.architecture: name for name, family in FAMILIES.items()}
    name = settings.get("model_type", "llama")
    if name not in FAMILIES:
        raise DataError(f"{path}: model_type is {shown(name)}; only {', '.join(FAMILIES)} can be read")
    family = FAMILIES[name]
    architectures = settings.get("architectures") or [family.architecture]
    if architectures == [family.scalar_architecture]:
        if len(settings.get("id2label") or "01") != 1:
            raise DataError(f"{path}: is a classifier of several labels; only a scalar head (one label) can be read")
        return name, family
    if architectures != [family.architecture]:
        kinds = [names[entry] for entry in architectures if entry in names]
        remedy = f"; that is of model_type {kinds[0]}" if kinds else f", and {', '.join(names)} can be read"
        raise DataError(
            f"{path}: architectures is {shown(architectures)}, not ['{family.architecture}'] of {name}{remedy}"
        )
    return name, family


def _own(path: str, settings: Mapping[str, Any]) -> dict[str, int]:
    """Holdfast's entries in an export: the context and the end of documents from training."""
    own = settings.get(OWN) or {}
    if not isinstance(own, dict) or any(type(value) is not int or value < 0 for value in own.values()):
        raise DataError(f"{path}: {OWN} is {shown(own)}; export the model again")
    return own


def _shape(path: str, family: str, settings: Mapping[str, Any]) -> Model:
    values = {field: settings.get(key, default) for field, (key, default) in SHAPE_KEYS.items()}
    values["context"] = _own(path, settings).get("context", values["context"])
    values["family"] = family
    values["head"] = "scalar" if settings.get("architectures") == [FAMILIES[family].scalar_architecture] else "tokens"
    values |= _read_mixture(path, family, settings)
    if (
        values["head_dim"]
        and values["heads"]
        and not PRESETS[family].latent
        and values["head_dim"] * values["heads"] == values["hidden"]
    ):
        values["head_dim"] = None
    values |= _read_rope(path, family, settings)
    if PRESETS[family].latent:
        values["latent"] = {field: settings[key] or 0 for field, key in LATENT_KEYS.items()}
        values["head_dim"] = (settings["qk_nope_head_dim"] or 0) + (settings["qk_rope_head_dim"] or 0)
    fields = PRESETS[family].fields
    values |= {field: settings[key] for field, key in MORE_KEYS.items() if field in fields and key in settings}
    values["layer_pattern"] = _read_pattern(path, family, values["layers"], settings)
    if values.get("query_scalar") == (values["head_dim"] or values["hidden"] // max(1, values["heads"])):
        values["query_scalar"] = None
    try:
        shape = Model.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        first, last = (str(detail["loc"][0]), str(detail["loc"][-1])) if detail["loc"] else ("the model", "")
        key = FAMILIES[family].mixture.get(".".join(map(str, detail["loc"])), {**ROPE_KEYS, **LATENT_KEYS}.get(last))
        key = key or SHAPE_KEYS.get(first, (MORE_KEYS.get(first, first), None))[0]
        raise DataError(f"{path}: {key} is {shown(detail['input'])}: {detail['msg']}") from None
    if (shape.head_dim is None and shape.hidden % shape.heads) or shape.heads % shape.key_value_heads:
        raise DataError(
            f"{path}: {shape.heads} heads do not divide a width of {shape.hidden}, "
            f"or are not a multiple of {shape.key_value_heads} key/value heads"
        )
    if shape.preset.latent and (shape.key_value_heads != shape.heads or shape.latent.rope >= shape.head_width):
        raise DataError(
            f"{path}: num_key_value_heads is {shape.key_value_heads} and qk_nope_head_dim "
            f"{shape.head_width - shape.latent.rope}; every one of {shape.heads} heads needs keys that are not rotated"
        )
    if shape.layers * shape.experts > MOST_EXPERTS:
        raise DataError(
            f"{path}: {shape.layers} layers of {shape.experts} experts; at most {MOST_EXPERTS} experts can be read"
        )
    if "sliding" in shape.layer_kinds and shape.sliding_window is None:
        raise DataError(f"{path}: sliding_window is null, and layer_types has sliding layers; give the window")
    if problem := _routing_problem(shape):
        raise DataError(f"{path}: {problem}")
    if (shape.rotary_fraction != 1 or shape.preset.latent) and (shape.rotary_width % 2 or shape.rotary_width < 2):
        raise DataError(f"{path}: a head rotates {shape.rotary_width} of {shape.head_width}; give pairs")
    if shape.head_width % 2:
        raise DataError(f"{path}: head_dim is {shape.head_width}; rotary positions need pairs")
    if (scaling := scaling_problem(shape)) is not None:
        name, value, message, remedy = scaling
        raise DataError(f"{path}: {ROPE_KEYS.get(name, name)} = {value} {message}; {remedy}")
    return shape


def _read_mixture(path: str, family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The spec's fields of the experts. Empty for a dense model."""
    keys = FAMILIES[family].mixture
    values = {field: settings.get(key) for field, key in keys.items()}
    if PRESETS[family].shared == "weighted":
        width, unit = settings["shared_expert_intermediate_size"], settings["moe_intermediate_size"]
        if width is None or not unit:
            key, value = ("moe_intermediate_size", unit) if not unit else ("shared_expert_intermediate_size", width)
            raise DataError(f"{path}: {key} is {shown(value)}; a positive number is needed")
        values["routing.shared"], rest = divmod(width, unit)
        if rest:
            raise DataError(
                f"{path}: shared_expert_intermediate_size is {width!r}; only multiples of moe_intermediate_size = "
                f"{unit} can be read"
            )
    if missing := [keys[field] for field, value in values.items() if value is None]:
        raise DataError(f"{path}: has no {missing[0]}; add it")
    if PRESETS[family].dense_first and not values["dense_layers"]:
        del values["dense_ffn"]
    routing = {field.removeprefix("routing."): values[field] for field in values if field.startswith("routing.")}
    routing["balance"] = "none"  # a training setting, not part of the weights
    dense = {field: values[field] for field in values if not field.startswith("routing.")}
    return {**dense, "routing": routing} if keys else {}


def _read_pattern(path: str, family: str, layers: Any, settings: Mapping[str, Any]) -> list[LayerKind] | None:
    """The shortest pattern that gives the kinds of all layers. None: that of the family."""
    preset, types = PRESETS[family], settings.get("layer_types")
    allowed = LAYER_KINDS if "sliding_window" in preset.fields and preset.pattern else {"full_attention": "full"}
    if types is not None and (wrong := [kind for kind in types if kind not in allowed]):
        names = " and ".join(map(repr, allowed))
        raise DataError(f"{path}: layer_types is {shown(wrong[0])} in a layer; only {names} can be read for {family}")
    if not preset.pattern or type(layers) is not int or layers > MOST_LAYERS:
        return None  # the shape's own check refuses a wrong number of layers
    default = [preset.pattern[index % len(preset.pattern)] for index in range(layers)]
    kinds: list[LayerKind] = [LAYER_KINDS[kind] for kind in types] if types is not None else default
    if "no_rope" in preset.pattern:
        every = settings.get("no_rope_layer_interval") or 4
        rotated = settings.get("no_rope_layers") or [int((index + 1) % every != 0) for index in range(layers)]
        kinds = ["full" if flag else "no_rope" for flag in rotated[:layers]]
    elif types is None and (every := settings.get("sliding_window_pattern")):  # Gemma 3 before transformers 5
        kinds = ["sliding" if (index + 1) % every else "full" for index in range(layers)]
    if len(kinds) != layers:
        raise DataError(f"{path}: layer_types has {len(kinds)} layers; num_hidden_layers is {layers}")
    if kinds == default:
        return None
    lengths = range(1, layers + 1)
    return next(
        kinds[:length] for length in lengths if all(a == b for a, b in zip(kinds, kinds[length:], strict=False))
    )


def _read_rope(path: str, family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of positions."""
    preset, defaults = PRESETS[family], FAMILIES[family]
    older = dict(settings.get("rope_scaling") or {})  # the key before transformers 5, which has priority
    if "type" in older:
        older.setdefault("rope_type", older["type"])
    current = dict(settings.get("rope_parameters") or {})
    local = current.pop("sliding_attention", None) or {}
    rope = {**current, **(current.pop("full_attention", None) or {}), **older}
    theta = rope.get("rope_theta", settings.get("rope_theta", defaults.theta))
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _read_scaling(path, family, rope, settings)}
    if preset.local_rope:
        if local.get("rope_type", "default") != "default":
            raise DataError(
                f"{path}: rope_type of sliding_attention is {shown(local['rope_type'])}; only default can be read"
            )
        local_theta = settings.get("rope_local_base_freq", defaults.local_theta)
        local_theta = local.get("rope_theta", theta if local_theta is None else local_theta)
        fields["rope_local_theta"] = None if local_theta == theta else local_theta
    fraction = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1))
    if "rotary_fraction" in preset.fields:
        fields["rotary_fraction"] = 1 if fraction is None else fraction
    elif fraction not in (None, 1):
        raise DataError(f"{path}: partial_rotary_factor is not 1; only heads that are rotated whole can be read")
    return fields


def _read_scaling(path: str, family: str, rope: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section `rope_scaling`."""
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if rope_type == "default" else rope_type
    if PRESETS[family].longrope and kind in ("su", "yarn"):  # earlier names, as in transformers
        kind = "longrope"
    if kind not in ROPE_FIELDS or (kind == "longrope" and not PRESETS[family].longrope):
        names = ", ".join(name for name in ROPE_FIELDS if name != "none")
        raise DataError(f"{path}: rope_type is {shown(rope_type)}; only default, {names} (of phi3) can be read")
    found = dict(rope)
    if kind in ("yarn", "longrope"):
        longest = settings.get("max_position_embeddings")
        original = found.setdefault(
            "original_max_position_embeddings", settings.get("original_max_position_embeddings") or longest
        )
        if found.get("factor") is None and longest and original:
            found["factor"] = longest / original
        above, below = found.get("mscale"), found.get("mscale_all_dim")
        if kind == "yarn" and found.get("attention_factor") is None and above and below:
            logarithm = 0.1 * math.log(max(found.get("factor") or 1, 1))
            found["attention_factor"] = (above * logarithm + 1) / (below * logarithm + 1)
    if not PRESETS[family].latent:
        found.pop("mscale_all_dim", None)  # in other families it only changes the factor above
    keys = {field: ROPE_KEYS[field] for field in ROPE_FIELDS[kind]}
    if missing := [key for field, key in keys.items() if found.get(key) is None and field not in ROPE_OPTIONAL]:
        raise DataError(f"{path}: rope_type {shown(rope_type)} without {missing[0]}; add it")
    return {"kind": kind, **{field: found[key] for field, key in keys.items() if found.get(key) is not None}}


def _routing_problem(shape: Model) -> str | None:
    """What keeps tokens from choosing their experts, or None."""
    routing, groups = shape.routing, shape.routing.groups
    if shape.experts == 1:
        return None
    if shape.experts % groups or (groups > 1 and shape.experts // groups < 2):
        return f"n_group is {groups}; {shape.experts} experts need groups of one size, at least 2"
    if routing.top_groups > groups or routing.top_groups * (shape.experts // groups) < routing.top_k:
        return f"topk_group is {routing.top_groups}, of {groups} groups; {routing.top_k} experts are chosen in them"
    return None
