"""config.json of the supported model families: reading it, and writing it for a model.

Settings that `transformers` would compute differently are refused by key. The written file loads there as the family's
class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from holdfast.spec.errors import DataError, Problem, shown
from holdfast.spec.model import (
    DENSE_FIRST,
    MOST_LAYERS,
    PRESETS,
    ROPE_FIELDS,
    LayerKind,
    Model,
    RopeScaling,
    scaling_problem,
)

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
# Fields that only some families have (`Preset.fields`).
_MORE_KEYS = {
    "sliding_window": "sliding_window",
    "query_scalar": "query_pre_attn_scalar",
    "attention_bias": "attention_bias",
    "query_key_norm": "use_qk_norm",
}
_LATENT_KEYS = {
    "query": "q_lora_rank",
    "key_value": "kv_lora_rank",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}
_ROPE_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "score_factor": "mscale_all_dim",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
_ROPE_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor", "score_factor")
_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
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


_WITH_MORE_LAYERS = ("glm4_moe", "deepseek_v3")  # layers for multi-token prediction after those of the model
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
_DEEPSEEK_KEYS = {
    **_EXPERT_KEYS,
    "experts": "n_routed_experts",
    "ffn": "moe_intermediate_size",
    "routing.shared": "n_shared_experts",
    "routing.groups": "n_group",
    "routing.top_groups": "topk_group",
    "routing.scale": "routed_scaling_factor",
    "dense_layers": "first_k_dense_replace",
    "dense_ffn": "intermediate_size",
}


class _Family(NamedTuple):
    """The differences of one family."""

    architecture: str
    fixed: dict[str, Any]  # keys with only this value, which is also the meaning of a missing key
    absent: dict[str, Any]  # other missing keys with a family-specific meaning
    mixture: Mapping[str, str] = MappingProxyType({})  # mixture-only keys, by the field of the spec
    activation: tuple[str, str] = ("hidden_act", "silu")
    theta: float = 10_000.0  # meaning of a missing rope_theta
    local_theta: float | None = None  # the same in sliding layers; None: that of the other layers


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
        {"attention_bias": False, "sliding_window": None},
        {
            "num_key_value_heads": 32,
            "hidden_size": 4608,
            "num_hidden_layers": 62,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "vocab_size": 152064,
            "intermediate_size": 10944,
            **_NO_GROUPS,
            "first_k_dense_replace": 0,
        },
        _DEEPSEEK_KEYS,
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM", {"attention_bias": False, "clip_qkv": None}, {"rms_norm_eps": 1e-5, "vocab_size": 50304}
    ),
    "olmo3": _Family(
        "Olmo3ForCausalLM",
        {"attention_bias": False, "clip_qkv": None},
        {"rms_norm_eps": 1e-5, "vocab_size": 50304, "sliding_window": 4096},
        theta=500_000.0,
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False},
        {
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
        theta=2_000_000.0,
    ),
    "phi3": _Family(
        "Phi3ForCausalLM",
        {"attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32064,
        },
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        {
            "attention_bias": False,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        theta=1_000_000.0,
        local_theta=10_000.0,
    ),
    "gpt_oss": _Family(
        "GptOssForCausalLM",
        {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "vocab_size": 201088,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {"experts": "num_local_experts", "routing.top_k": "num_experts_per_tok"},
        theta=150_000.0,
    ),
    "glm4_moe": _Family(
        "Glm4MoeForCausalLM",
        {},
        {
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "vocab_size": 151552,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "attention_bias": False,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.5,
            **_NO_GROUPS,
            "first_k_dense_replace": 1,
        },
        _DEEPSEEK_KEYS,
    ),
    "deepseek_v3": _Family(
        "DeepseekV3ForCausalLM",
        {"attention_bias": False, "rope_interleave": True, "pretraining_tp": 1},
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "intermediate_size": 18432,
            "max_position_embeddings": 4096,
            "vocab_size": 129280,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        _DEEPSEEK_KEYS,
    ),
}


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
        _OBJECT: "rope_scaling rope_parameters id2label",
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
    _require_types(path, settings, _TYPES)
    for section in ("rope_scaling", "rope_parameters"):
        rope = settings.get(section) or {}
        _require_types(f"{path}: {section}", rope, {**_ROPE_TYPES, **dict.fromkeys(_KINDS, _OBJECT)})
        for kind in _KINDS:
            _require_types(f"{path}: {section}.{kind}", rope.get(kind) or {}, _ROPE_TYPES)
    name, family = _family(path, settings)
    for key, required in {**dict([family.activation]), **family.fixed}.items():
        if settings.get(key) not in (required, None):
            raise DataError(f"{path}: {key} is {shown(settings[key])}; only {required!r} can be read")
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
    more_layers = settings.get("num_nextn_predict_layers") or 0 if name in _WITH_MORE_LAYERS else 0
    return ReadConfig(shape, vocabulary, end_of_text, stops, more_layers)


def fixed_fields(shape: Model, weights: Model | None = None) -> dict[str, object]:
    """The fields of a spec that weights determine, with their defaults resolved. The weights' model selects the fields.
    By default it is the model itself."""
    weights = weights or shape
    scaling, groups = shape.rope_scaling, weights.family in DENSE_FIRST
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
        **(
            {f"latent.{field}": getattr(shape.latent, field) for field in _LATENT_KEYS} if weights.preset.latent else {}
        ),
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
        settings["architectures"] = [_scalar(shape.family)]
        settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one number
    return settings | _rope_keys(shape) | _keys_of_some(shape)


def _scalar(family: str) -> str:
    """The architecture of a family with a scalar head in place of the tokens'."""
    if family == "gemma3_text":
        return "Gemma3TextForSequenceClassification"
    return _FAMILIES[family].architecture.replace("ForCausalLM", "ForSequenceClassification")


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


def _keys_of_some(shape: Model) -> dict[str, Any]:
    """The config.json keys that only some families have."""
    preset, kinds = shape.preset, shape.layer_kinds
    keys: dict[str, Any] = {_MORE_KEYS[field]: getattr(shape, field) for field in preset.fields if field in _MORE_KEYS}
    if shape.family not in ("llama", "dots1", "glm4_moe", "olmo2", "deepseek_v3"):
        keys["sliding_window"] = shape.sliding_window
    if "query_scalar" in preset.fields:
        scalar = shape.query_scalar or shape.head_width
        keys["query_pre_attn_scalar"] = int(scalar) if float(scalar).is_integer() else scalar
    if "layer_pattern" in preset.fields:
        names = {kind: name for name, kind in _KINDS.items()}
        keys["layer_types"] = [names.get(kind, "full_attention") for kind in kinds]
    if shape.family == "smollm3":
        keys["no_rope_layers"] = [int(kind != "no_rope") for kind in kinds]
    if shape.family in ("smollm3", "phi3", "gemma3_text"):
        keys["pad_token_id"] = None  # not the class's default, which may be outside the vocabulary
    if preset.latent:
        latent = shape.latent
        keys |= {key: getattr(latent, field) for field, key in _LATENT_KEYS.items()}
        keys |= {"q_lora_rank": latent.query or None, "qk_nope_head_dim": shape.head_width - latent.rope}
        keys["head_dim"] = latent.rope
    if shape.family in _WITH_MORE_LAYERS:
        keys["num_nextn_predict_layers"] = 0
    return keys


def _of_mixture(shape: Model, family: _Family) -> dict[str, Any]:
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
    if architectures == [_scalar(name)]:
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
    values = {field: settings.get(key, default) for field, (key, default) in _SHAPE_KEYS.items()}
    values["context"] = _own(path, settings).get("context", values["context"])
    values["family"] = family
    values["head"] = "scalar" if settings.get("architectures") == [_scalar(family)] else "tokens"
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
        values["latent"] = {field: settings[key] or 0 for field, key in _LATENT_KEYS.items()}
        values["head_dim"] = (settings["qk_nope_head_dim"] or 0) + (settings["qk_rope_head_dim"] or 0)
    fields = PRESETS[family].fields
    values |= {field: settings[key] for field, key in _MORE_KEYS.items() if field in fields and key in settings}
    values["layer_pattern"] = _read_pattern(path, family, values["layers"], settings)
    if values.get("query_scalar") == (values["head_dim"] or values["hidden"] // max(1, values["heads"])):
        values["query_scalar"] = None
    try:
        shape = Model.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        first, last = (str(detail["loc"][0]), str(detail["loc"][-1])) if detail["loc"] else ("the model", "")
        key = _FAMILIES[family].mixture.get(".".join(map(str, detail["loc"])), {**_ROPE_KEYS, **_LATENT_KEYS}.get(last))
        key = key or _SHAPE_KEYS.get(first, (_MORE_KEYS.get(first, first), None))[0]
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
    if problem := routing_problem(shape):
        raise DataError(f"{path}: {problem}")
    if (shape.rotary_fraction != 1 or shape.preset.latent) and (shape.rotary_width % 2 or shape.rotary_width < 2):
        raise DataError(f"{path}: a head rotates {shape.rotary_width} of {shape.head_width}; give pairs")
    if shape.head_width % 2:
        raise DataError(f"{path}: head_dim is {shape.head_width}; rotary positions need pairs")
    if (scaling := scaling_problem(shape)) is not None:
        name, value, message, remedy = scaling
        raise DataError(f"{path}: {_ROPE_KEYS.get(name, name)} = {value} {message}; {remedy}")
    return shape


def _read_mixture(path: str, family: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The spec's fields of the experts. Empty for a dense model."""
    keys = _FAMILIES[family].mixture
    values = {field: settings.get(key) for field, key in keys.items()}
    if family == "qwen2_moe":
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
    if family in DENSE_FIRST and not values["dense_layers"]:
        del values["dense_ffn"]
    routing = {field.removeprefix("routing."): values[field] for field in values if field.startswith("routing.")}
    routing["balance"] = "none"  # a training setting, not part of the weights
    dense = {field: values[field] for field in values if not field.startswith("routing.")}
    return {**dense, "routing": routing} if keys else {}


def _read_pattern(path: str, family: str, layers: Any, settings: Mapping[str, Any]) -> list[LayerKind] | None:
    """The shortest pattern that gives the kinds of all layers. None: that of the family."""
    preset, types = PRESETS[family], settings.get("layer_types")
    allowed = _KINDS if "sliding_window" in preset.fields and preset.pattern else {"full_attention": "full"}
    if types is not None and (wrong := [kind for kind in types if kind not in allowed]):
        names = " and ".join(map(repr, allowed))
        raise DataError(f"{path}: layer_types is {shown(wrong[0])} in a layer; only {names} can be read for {family}")
    if not preset.pattern or type(layers) is not int or layers > MOST_LAYERS:
        return None  # the shape's own check refuses a wrong number of layers
    default = [preset.pattern[index % len(preset.pattern)] for index in range(layers)]
    kinds: list[LayerKind] = [_KINDS[kind] for kind in types] if types is not None else default
    if family == "smollm3":
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
    preset, defaults = PRESETS[family], _FAMILIES[family]
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
    if family == "phi3" and kind in ("su", "yarn"):  # earlier names, as in transformers
        kind = "longrope"
    if kind not in ROPE_FIELDS or (kind == "longrope" and family != "phi3"):
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
    keys = {field: _ROPE_KEYS[field] for field in ROPE_FIELDS[kind]}
    if missing := [key for field, key in keys.items() if found.get(key) is None and field not in _ROPE_OPTIONAL]:
        raise DataError(f"{path}: rope_type {shown(rope_type)} without {missing[0]}; add it")
    return {"kind": kind, **{field: found[key] for field, key in keys.items() if found.get(key) is not None}}


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    kind = "default" if scaling.kind == "none" else scaling.kind
    values = {_ROPE_KEYS[field]: getattr(scaling, field) for field in ROPE_FIELDS[scaling.kind]}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {"rope_type": kind, **{key: value for key, value in values.items() if value is not None}}


def routing_problem(shape: Model) -> str | None:
    """What keeps tokens from choosing their experts, or None."""
    routing, groups = shape.routing, shape.routing.groups
    if shape.experts == 1:
        return None
    if shape.experts % groups or (groups > 1 and shape.experts // groups < 2):
        return f"n_group is {groups}; {shape.experts} experts need groups of one size, at least 2"
    if routing.top_groups > groups or routing.top_groups * (shape.experts // groups) < routing.top_k:
        return f"topk_group is {routing.top_groups}, of {groups} groups; {routing.top_k} experts are chosen in them"
    return None
