"""config.json of the supported model families: reading it, and writing it for a model.

Settings that `transformers` would compute differently are refused by key. The written file loads there as the family's
class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from holdfast.spec.errors import DataError, shown
from holdfast.spec.model import Model, RopeScaling

# Settings of the tuned model that an export keeps: begin, end and padding tokens, sampling settings, templates.
#
# Weights and shape come from the run. Of the base's documents, entries that name code, quantized weights or locations
# are not kept.

OWN = "holdfast"  # key of config.json for the run's values in an export
KEPT = ("bos_token_id", "pad_token_id", "dtype", "torch_dtype", "use_cache")  # keys of config.json
NOT_KEPT = ("auto_map", "_from_model_config", "name_or_path", "tokenizer_file")  # keys of the other documents


@dataclass(frozen=True)
class Base:
    """The documents of a base. Missing ones are empty."""

    config: Mapping[str, Any] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    special_tokens_map: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)  # by name

    def documents(self, config: dict[str, Any], end_of_text: str, end_id: int) -> dict[str, dict[str, Any]]:
        """The JSON documents of an export with the config.json `config`."""
        documents = {"config.json": self._config(config, end_id)}
        settings = documents["config.json"]
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        fallback: dict[str, Any] = {key: settings[key] for key in ids if key in settings}
        generation = _kept(self.generation_config) or {**fallback, "do_sample": True}
        ends = generation.get("eos_token_id", settings["eos_token_id"])
        documents["generation_config.json"] = {**generation, "eos_token_id": _with_end(ends, end_id)}
        own = {
            "clean_up_tokenization_spaces": False,
            "model_max_length": settings["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        special_tokens = _kept(self.special_tokens_map)
        tokens = {
            "eos_token": end_of_text,
            **{key: token for key, token in special_tokens.items() if key.endswith("_token")},
        }
        if not self.tokenizer_config and not self.config:
            tokens = {"bos_token": end_of_text, **tokens}
        tokenizer_fields = {key: value for key, value in _kept(self.tokenizer_config).items() if key != "chat_template"}
        if tokenizer_fields.get("eos_token") is None:
            tokenizer_fields.pop("eos_token", None)
        documents["tokenizer_config.json"] = {**own, **tokens, **tokenizer_fields}
        if len(self.templates) > 1 or (self.templates and "default" not in self.templates):
            several = [{"name": name, "template": text} for name, text in sorted(self.templates.items())]
            documents["tokenizer_config.json"]["chat_template"] = several
        if special_tokens:
            documents["special_tokens_map.json"] = special_tokens
        return documents

    def _config(self, config: dict[str, Any], end_id: int) -> dict[str, Any]:
        if not self.config:
            return config
        context = config["max_position_embeddings"]
        settings = {key: self.config[key] for key in KEPT if key in self.config}
        dtype = settings.get("dtype", settings.get("torch_dtype", config["dtype"]))
        merged = {
            **{key: value for key, value in config.items() if key != "bos_token_id"},
            **settings,
            "dtype": dtype,
            "torch_dtype": dtype,
            "eos_token_id": _with_end(self.config.get("eos_token_id"), end_id),
            OWN: {"context": context, "end_of_text_id": end_id},
        }
        longest = self.config.get("max_position_embeddings")
        if isinstance(longest, int):
            merged["max_position_embeddings"] = max(longest, context)
        return merged


def _with_end(ends: Any, end_id: int) -> Any:
    """The end tokens of a base with that of the run: unchanged if they contain it, otherwise with it first."""
    end_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end_id in end_ids:
        return ends
    return [end_id, *end_ids] if end_ids else end_id


def _kept(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in NOT_KEPT}


# field of the spec -> key of config.json, and the meaning of a missing key unless the family defines another
_SHAPE_KEYS: dict[str, tuple[str, Any]] = {
    "layers": ("num_hidden_layers", 32),
    "hidden": ("hidden_size", 4096),
    "heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "ffn": ("intermediate_size", 11008),
    "context": ("max_position_embeddings", 2048),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tie_embeddings": ("tie_word_embeddings", False),
    "init_std": ("initializer_range", 0.02),
}
_ROPE_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
# kinds of scaling, and the fields that each one needs
ROPE_FIELDS: dict[str, tuple[str, ...]] = {"none": (), "linear": ("factor",), "llama3": tuple(_ROPE_KEYS)}
_EXPERT_KEYS = {"experts": "num_experts", "routing.top_k": "num_experts_per_tok", "routing.normalise": "norm_topk_prob"}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "intermediate_size": 22016, "max_position_embeddings": 32768}
_QWEN_MOE_DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "norm_topk_prob": False,
}
# Every layer is a mixture.
_ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}


class _Family(NamedTuple):
    """The differences of one family."""

    architecture: str
    fixed: dict[str, Any]  # keys with only this value, which is also the meaning of a missing key
    absent: dict[str, Any]  # other missing keys with a family-specific meaning
    mixture: Mapping[str, str] = MappingProxyType({})  # mixture-only keys, by the field of the spec


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}, {}),
    "mistral": _Family(
        "MistralForCausalLM",
        {},
        {
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": _Family("Qwen2ForCausalLM", {"use_sliding_window": False}, {**_QWEN_DEFAULTS, "vocab_size": 151936}),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        {"attention_bias": False, "use_sliding_window": False},
        {**_QWEN_DEFAULTS, "vocab_size": 151936, "head_dim": 128},
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        {"router_jitter_noise": 0.0},
        {
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"experts": "num_local_experts", "routing.top_k": "num_experts_per_tok"},
    ),
    "qwen2_moe": _Family(
        "Qwen2MoeForCausalLM",
        {**_ALL_SPARSE, "use_sliding_window": False, "qkv_bias": True},
        {
            **_QWEN_MOE_DEFAULTS,
            "num_key_value_heads": 16,
            "num_attention_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
        },
        {**_EXPERT_KEYS, "ffn": "moe_intermediate_size"},
    ),
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM",
        {**_ALL_SPARSE, "attention_bias": False, "use_sliding_window": False},
        {
            **_QWEN_MOE_DEFAULTS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        {**_EXPERT_KEYS, "ffn": "moe_intermediate_size"},
    ),
    "dots1": _Family(
        "Dots1ForCausalLM",
        {
            "attention_bias": False,
            "sliding_window": None,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        {
            "num_key_value_heads": 32,
            "hidden_size": 4608,
            "num_hidden_layers": 62,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "vocab_size": 152064,
        },
        {
            **_EXPERT_KEYS,
            "experts": "n_routed_experts",
            "ffn": "moe_intermediate_size",
            "routing.shared": "n_shared_experts",
        },
    ),
}


MOST_EXPERTS = 1_000_000  # over all layers; each has separate tensors
MOST_INTEGER = 2**31 - 1
MOST_FLOAT = 1e300
# The types of the keys that are read. Missing keys and null are handled where they are used.
_INTEGER, _NUMBER, _FLAG = "an integer", "a number", "true or false"
_TEXT, _TEXTS, _OBJECT = "text", "a list of texts", "an object"
_TYPES: dict[str, str] = {
    key: kind
    for kind, keys in {
        _INTEGER: """
            num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim
            intermediate_size max_position_embeddings vocab_size sliding_window moe_intermediate_size
            shared_expert_intermediate_size num_experts num_local_experts num_experts_per_tok
            n_routed_experts n_shared_experts
        """,
        _NUMBER: "rms_norm_eps initializer_range rope_theta partial_rotary_factor",
        _FLAG: "tie_word_embeddings norm_topk_prob",
        _TEXT: "model_type hidden_act",
        _TEXTS: "architectures layer_types",
        _OBJECT: "rope_scaling rope_parameters",
    }.items()
    for key in keys.split()
}
_ROPE_TYPES: dict[str, str] = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"), _NUMBER),
    "original_max_position_embeddings": _INTEGER,
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
    if kind == _TEXTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, dict)


def _require_types(path: str, settings: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Raises DataError for a key whose value has another type than readers of config.json expect."""
    for key, kind in types.items():
        if (value := settings.get(key)) is not None and not _is(kind, value):
            raise DataError(f"{path}: {key} is {shown(value)}; {kind} is needed")


class ReadConfig(NamedTuple):
    """The content of a config.json."""

    shape: Model
    vocabulary: int
    end_of_text: (
        int | None
    )  # in an export of Holdfast the end of documents; otherwise eos_token_id, the first of several
    stops: tuple[int, ...] = ()  # all of eos_token_id


def read_config(path: str, settings: Mapping[str, Any]) -> ReadConfig:
    """The model that a config.json (`settings`, from `path`) describes. Raises DataError with the wrong key."""
    _require_types(path, settings, _TYPES)
    for section in ("rope_scaling", "rope_parameters"):
        _require_types(f"{path}: {section}", settings.get(section) or {}, _ROPE_TYPES)
    name, family = _family(path, settings)
    for key, required in {"hidden_act": "silu", **family.fixed}.items():
        if settings.get(key) not in (required, None):
            raise DataError(f"{path}: {key} is {shown(settings[key])}; only {required!r} can be read")
    if set(settings.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise DataError(f"{path}: layer_types is {shown(settings['layer_types'])}; only 'full_attention' can be read")
    count = {
        family.mixture[field]: settings["num_local_experts"]
        for field in family.mixture
        if field == "experts" and "num_local_experts" in settings
    }  # the key of transformers 5
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
    return ReadConfig(shape, vocabulary, end_of_text, stops)


def fixed_fields(shape: Model, rope: str) -> dict[str, object]:
    """The fields of a spec that weights determine, with their defaults resolved. `rope` is the weights' kind of
    scaling."""
    scaling = shape.rope_scaling
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
        **{f"rope_scaling.{field}": getattr(scaling, field) for field in ROPE_FIELDS[rope]},
        "sliding_window": shape.sliding_window,
        "norm_epsilon": shape.norm_epsilon,
        "tie_embeddings": shape.tie_embeddings,
        "experts": shape.experts,
        **(
            {
                "routing.top_k": shape.routing.top_k,
                "routing.normalise": shape.normalised,
                "routing.shared": shape.routing.shared,
            }
            if shape.experts > 1
            else {}
        ),
    }


def config(shape: Model, vocabulary: int, end_id: int) -> dict[str, Any]:
    """The config.json of a model whose documents end with the token `end_id`."""
    family = _FAMILIES[shape.family]
    settings = {
        "architectures": [family.architecture],
        "attention_dropout": 0.0,
        "bos_token_id": end_id,
        "dtype": "float32",
        "eos_token_id": end_id,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.ffn_width,
        "max_position_embeddings": shape.context,
        "model_type": shape.family,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.key_value_heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_theta, **_rope(shape.rope_scaling)},
        "rope_theta": shape.rope_theta,  # for readers older than transformers 5
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32",  # for readers older than transformers 5
        "use_cache": True,
        "vocab_size": vocabulary,
        **family.fixed,
        **_of_mixture(shape, family),
    }
    if shape.rope_scaling.kind != "none":
        settings["rope_scaling"] = _rope(shape.rope_scaling)  # for readers older than transformers 5
    if shape.family not in ("llama", "dots1"):
        settings["sliding_window"] = shape.sliding_window
    return settings


def _of_mixture(shape: Model, family: _Family) -> dict[str, Any]:
    """The config.json keys of the experts."""
    routing = shape.routing
    values: dict[str, Any] = {
        "experts": shape.experts,
        "ffn": shape.ffn_width,
        "routing.top_k": routing.top_k,
        "routing.normalise": routing.normalise,
        "routing.shared": routing.shared,
    }
    config = {key: values[field] for field, key in family.mixture.items()}
    if shape.family == "qwen2_moe":
        config["shared_expert_intermediate_size"] = routing.shared * shape.ffn_width
    return config


def _family(path: str, settings: Mapping[str, Any]) -> tuple[str, _Family]:
    names = {family.architecture: name for name, family in _FAMILIES.items()}
    name = settings.get("model_type", "llama")
    if name not in _FAMILIES:
        raise DataError(f"{path}: model_type is {shown(name)}; only {', '.join(_FAMILIES)} can be read")
    family = _FAMILIES[name]
    architectures = settings.get("architectures") or [family.architecture]
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
    values = {field: settings.get(key, default) for field, (key, default) in _SHAPE_KEYS.items()}
    values["context"] = _own(path, settings).get("context", values["context"])
    values["family"] = family
    values |= _read_mixture(path, family, settings)
    if values["head_dim"] and values["heads"] and values["head_dim"] * values["heads"] == values["hidden"]:
        values["head_dim"] = None
    values["rope_theta"], values["rope_scaling"] = _read_rope(path, settings)
    if family in ("mistral", "mixtral"):
        values["sliding_window"] = settings.get("sliding_window")
    try:
        shape = Model.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        first, last = (str(detail["loc"][0]), str(detail["loc"][-1])) if detail["loc"] else ("the model", "")
        key = _FAMILIES[family].mixture.get(".".join(map(str, detail["loc"])), _ROPE_KEYS.get(last))
        key = key or _SHAPE_KEYS.get(first, (first, None))[0]
        raise DataError(f"{path}: {key} is {shown(detail['input'])}: {detail['msg']}") from None
    if (shape.head_dim is None and shape.hidden % shape.heads) or shape.heads % shape.key_value_heads:
        raise DataError(
            f"{path}: {shape.heads} heads do not divide a width of {shape.hidden}, "
            f"or are not a multiple of {shape.key_value_heads} key/value heads"
        )
    if shape.layers * shape.experts > MOST_EXPERTS:
        raise DataError(
            f"{path}: {shape.layers} layers of {shape.experts} experts; at most {MOST_EXPERTS} experts can be read"
        )
    if shape.head_width % 2:
        raise DataError(f"{path}: head_dim is {shape.head_width}; rotary positions need pairs")
    return shape


def _read_mixture(path: str, family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The spec's fields of the experts. Empty for a dense model."""
    keys = _FAMILIES[family].mixture
    values = {field: settings.get(key) for field, key in keys.items()}
    if family == "qwen2_moe":
        width, unit = settings["shared_expert_intermediate_size"], settings["moe_intermediate_size"]
        values["routing.shared"], rest = divmod(width, unit) if width is not None and unit else (None, 0)
        if rest:
            raise DataError(
                f"{path}: shared_expert_intermediate_size is {width!r}; only multiples of moe_intermediate_size = "
                f"{unit} can be read"
            )
    if missing := [keys[field] for field, value in values.items() if value is None]:
        raise DataError(f"{path}: has no {missing[0]}; add it")
    routing = {field.removeprefix("routing."): values[field] for field in values if field.startswith("routing.")}
    routing["balance"] = "none"  # a training setting, not part of the weights
    dense = {field: values[field] for field in values if not field.startswith("routing.")}
    return {**dense, "routing": routing} if keys else {}


def _read_rope(path: str, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The base of the frequencies and the section `rope_scaling`."""
    older = dict(settings.get("rope_scaling") or {})  # the key before transformers 5, which has priority
    if "type" in older:
        older.setdefault("rope_type", older["type"])
    rope = {**(settings.get("rope_parameters") or {}), **older}
    theta = rope.get("rope_theta", settings.get("rope_theta", 10_000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if rope_type == "default" else rope_type
    if kind not in ROPE_FIELDS:
        raise DataError(f"{path}: rope_type is {shown(rope_type)}; only default, linear and llama3 can be read")
    if rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1)) not in (None, 1):
        raise DataError(f"{path}: partial_rotary_factor is not 1; only heads that are rotated whole can be read")
    required = {field: _ROPE_KEYS[field] for field in ROPE_FIELDS[kind]}
    if missing := [key for key in required.values() if key not in rope]:
        raise DataError(f"{path}: rope_type {shown(rope_type)} without {missing[0]}; add it")
    return theta, {"kind": kind, **{field: rope[key] for field, key in required.items()}}


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    kind = "default" if scaling.kind == "none" else scaling.kind
    return {"rope_type": kind, **{_ROPE_KEYS[field]: getattr(scaling, field) for field in ROPE_FIELDS[scaling.kind]}}
