"""The config.json of each model family: its architecture, keys and defaults."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.spec.families import LayerKind

# field of the spec -> key of config.json, and the meaning of a missing key unless the family defines another
SHAPE_KEYS: dict[str, tuple[str, Any]] = {
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
MORE_KEYS = {
    "sliding_window": "sliding_window",
    "query_scalar": "query_pre_attn_scalar",
    "attention_bias": "attention_bias",
    "query_key_norm": "use_qk_norm",
}
LATENT_KEYS = {
    "query": "q_lora_rank",
    "key_value": "kv_lora_rank",
    "rope": "qk_rope_head_dim",
    "value": "v_head_dim",
}
ROPE_KEYS = {
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
ROPE_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor", "score_factor")
LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
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
_NO_PADDING = {"pad_token_id": None}  # the class's default may be outside the vocabulary
MORE_LAYERS = "num_nextn_predict_layers"  # layers for multi-token prediction after those of the model
_NO_MORE_LAYERS = {MORE_LAYERS: 0}
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


class FamilyConfig(NamedTuple):
    """The differences of one family."""

    architecture: str
    fixed: dict[str, Any]  # keys with only this value, which is also the meaning of a missing key
    absent: dict[str, Any]  # other missing keys with a family-specific meaning
    mixture: Mapping[str, str] = MappingProxyType({})  # mixture-only keys, by the field of the spec
    activation: tuple[str, str] = ("hidden_act", "silu")
    theta: float = 10_000.0  # meaning of a missing rope_theta
    local_theta: float | None = None  # the same in sliding layers; None: that of the other layers
    window: bool = True  # the class has `sliding_window`
    written: Mapping[str, Any] = MappingProxyType({})  # keys that are written with one value and read with others
    scalar: str | None = None  # the architecture with a scalar head; None: by the usual rule

    @property
    def scalar_architecture(self) -> str:
        """The architecture with a scalar head in place of the tokens'."""
        return self.scalar or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


FAMILIES: dict[str, FamilyConfig] = {
    "llama": FamilyConfig(
        "LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}, {}, window=False
    ),
    "mistral": FamilyConfig(
        "MistralForCausalLM",
        {},
        {
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": FamilyConfig("Qwen2ForCausalLM", {"use_sliding_window": False}, {**_QWEN_DEFAULTS, "vocab_size": 151936}),
    "qwen3": FamilyConfig(
        "Qwen3ForCausalLM",
        {"attention_bias": False, "use_sliding_window": False},
        {**_QWEN_DEFAULTS, "vocab_size": 151936, "head_dim": 128},
    ),
    "mixtral": FamilyConfig(
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
    "qwen2_moe": FamilyConfig(
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
    "qwen3_moe": FamilyConfig(
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
    "dots1": FamilyConfig(
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
        window=False,
    ),
    "olmo2": FamilyConfig(
        "Olmo2ForCausalLM",
        {"attention_bias": False, "clip_qkv": None},
        {"rms_norm_eps": 1e-5, "vocab_size": 50304},
        window=False,
    ),
    "olmo3": FamilyConfig(
        "Olmo3ForCausalLM",
        {"attention_bias": False, "clip_qkv": None},
        {"rms_norm_eps": 1e-5, "vocab_size": 50304, "sliding_window": 4096},
        theta=500_000.0,
    ),
    "smollm3": FamilyConfig(
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
        written=_NO_PADDING,
    ),
    "phi3": FamilyConfig(
        "Phi3ForCausalLM",
        {"attention_bias": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32064,
        },
        written=_NO_PADDING,
    ),
    "gemma3_text": FamilyConfig(
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
        written=_NO_PADDING,
        scalar="Gemma3TextForSequenceClassification",
    ),
    "gpt_oss": FamilyConfig(
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
    "glm4_moe": FamilyConfig(
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
        window=False,
        written=_NO_MORE_LAYERS,
    ),
    "deepseek_v3": FamilyConfig(
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
        window=False,
        written=_NO_MORE_LAYERS,
    ),
}
