"""Models of every family, tiny and random: the same one by Holdfast and by `transformers`."""

import math

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from holdfast.model.decoder import Decoder
from holdfast.spec.model import Model
from tests.model.tiny_model import decoder, shape

VOCABULARY, CONTEXT = 300, 48
TOKENS = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
NOT_BALANCED = {"top_k": 2, "balance": "none"}
YARN = {"kind": "yarn", "factor": 4.0, "original_context": 16, "beta_fast": 4.0}
YARN_KEYS = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
YARN_FACTOR = (0.1 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1)
LATENT = {"query": 10, "key_value": 14, "rope": 8, "value": 6}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_context": 16}

# The model fields of a spec, and the names in `transformers`.
FAMILIES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "linear rope": (
        {"rope_scaling": {"kind": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama 3": (
        {"rope_scaling": LLAMA3, "rope_theta": 500.0, "kv_heads": 2},
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": (
        {"family": "mistral", "kv_heads": 2, "head_dim": 12, "tie_embeddings": False},
        {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None},
    ),
    "mistral, window": (
        {"family": "mistral", "kv_heads": 2, "sliding_window": 7, "tie_embeddings": False},
        {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 7},
    ),
    "qwen2": ({"family": "qwen2", "kv_heads": 2}, {"model_type": "qwen2", "num_key_value_heads": 2}),
    "qwen3": (
        {"family": "qwen3", "kv_heads": 2, "head_dim": 20, "hidden": 36},
        {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 36},
    ),
    "mixtral": (
        {"family": "mixtral", "kv_heads": 2, "experts": 4, "routing": NOT_BALANCED, "tie_embeddings": False},
        {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        {"family": "qwen3_moe", "kv_heads": 2, "head_dim": 20, "hidden": 36, "experts": 6, "routing": NOT_BALANCED},
        {
            "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 20, "hidden_size": 36, "num_experts": 6,
            "moe_intermediate_size": 40, "num_experts_per_tok": 2, "norm_topk_prob": True, "intermediate_size": 96,
        },
    ),
    "qwen2_moe": (
        {
            "family": "qwen2_moe", "kv_heads": 2, "experts": 5,
            "routing": {**NOT_BALANCED, "shared": 3, "normalise": False, "top_k": 3},
        },
        {
            "model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 5, "moe_intermediate_size": 40,
            "num_experts_per_tok": 3, "shared_expert_intermediate_size": 120, "norm_topk_prob": False,
        },
    ),
    "dots1": (
        {"family": "dots1", "kv_heads": 2, "experts": 6, "routing": {**NOT_BALANCED, "shared": 1}},
        {
            "model_type": "dots1", "num_key_value_heads": 2, "n_routed_experts": 6, "moe_intermediate_size": 40,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True, "sliding_window": None,
        },
    ),
    "olmo2": (
        {"family": "olmo2", "kv_heads": 2, "tie_embeddings": False},
        {"model_type": "olmo2", "num_key_value_heads": 2},
    ),
    "olmo3": (
        {
            "family": "olmo3", "kv_heads": 2, "layers": 4, "sliding_window": 7, "rope_theta": 500.0,
            "rope_scaling": YARN, "tie_embeddings": False,
        },
        {
            "model_type": "olmo3", "num_key_value_heads": 2, "num_hidden_layers": 4, "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **YARN_KEYS},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "smollm3": (
        {"family": "smollm3", "kv_heads": 2, "layers": 4},
        {"model_type": "smollm3", "num_key_value_heads": 2, "num_hidden_layers": 4, "pad_token_id": 0},
    ),
    "phi3": (
        {"family": "phi3", "kv_heads": 2, "sliding_window": 20, "tie_embeddings": False},
        {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 20, "pad_token_id": 0},
    ),
    "phi3, longrope": (
        {
            "family": "phi3", "kv_heads": 2, "rotary_fraction": 0.5, "hidden": 64,
            "rope_scaling": {
                "kind": "longrope", "factor": 3.0, "original_context": 16, "short_factors": [1.0, 1.5, 2.0, 2.5],
                "long_factors": [1.0, 2.0, 4.0, 8.0],
            },
        },
        {
            "model_type": "phi3", "num_key_value_heads": 2, "hidden_size": 64, "pad_token_id": 0,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma3_text": (
        {
            "family": "gemma3_text", "kv_heads": 2, "layers": 3, "head_dim": 12, "sliding_window": 7,
            "rope_theta": 1000.0, "rope_local_theta": 100.0, "query_scalar": 20.0,
            "layer_pattern": ["sliding", "full", "sliding"],
            "rope_scaling": {"kind": "linear", "factor": 4.0},
        },
        {
            "model_type": "gemma3_text", "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 12,
            "sliding_window": 7, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gpt_oss": (
        {
            "family": "gpt_oss", "kv_heads": 2, "head_dim": 12, "experts": 5, "routing": NOT_BALANCED,
            "sliding_window": 7, "rope_theta": 1000.0, "rope_scaling": {**YARN, "truncate": False},
            "tie_embeddings": False,
        },
        {
            "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 5,
            "num_experts_per_tok": 2, "sliding_window": 7,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, **YARN_KEYS, "truncate": False},
        },
    ),
    "glm4_moe": (
        {
            "family": "glm4_moe", "kv_heads": 2, "layers": 3, "experts": 8, "rotary_fraction": 0.5, "head_dim": 12,
            "attention_bias": True, "query_key_norm": True, "dense_layers": 1, "dense_ffn": 56,
            "tie_embeddings": False,
            "routing": {**NOT_BALANCED, "shared": 1, "groups": 4, "top_groups": 2, "scale": 2.5},
        },
        {
            "model_type": "glm4_moe", "num_key_value_heads": 2, "num_hidden_layers": 3, "n_routed_experts": 8,
            "head_dim": 12, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1,
            "intermediate_size": 56, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek_v3": (
        {
            "family": "deepseek_v3", "layers": 3, "experts": 8, "head_dim": 12, "dense_layers": 1, "dense_ffn": 56,
            "latent": LATENT, "tie_embeddings": False, "rope_theta": 500.0,
            "rope_scaling": {**YARN, "score_factor": 0.5, "attention_factor": YARN_FACTOR},
            "routing": {**NOT_BALANCED, "shared": 1, "groups": 4, "top_groups": 2, "scale": 2.5},
        },
        {
            "model_type": "deepseek_v3", "num_hidden_layers": 3, "n_routed_experts": 8, "num_key_value_heads": 4,
            "q_lora_rank": 10, "kv_lora_rank": 14, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6,
            "first_k_dense_replace": 1, "intermediate_size": 56, "moe_intermediate_size": 40, "n_group": 4,
            "num_experts_per_tok": 2, "topk_group": 2, "num_nextn_predict_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 500.0, **YARN_KEYS, "mscale": 1.0, "mscale_all_dim": 0.5,
            },
        },
    ),
    "deepseek_v3, no latent of queries": (
        {
            "family": "deepseek_v3", "experts": 4, "head_dim": 12, "latent": {**LATENT, "query": 0},
            "tie_embeddings": False, "routing": {**NOT_BALANCED, "shared": 1},
        },
        {
            "model_type": "deepseek_v3", "n_routed_experts": 4, "num_key_value_heads": 4, "first_k_dense_replace": 0,
            "q_lora_rank": None, "kv_lora_rank": 14, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 6,
            "moe_intermediate_size": 40, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
        },
    ),
}  # fmt: skip
NEW = (
    "deepseek_v3",
    "deepseek_v3, no latent of queries",
    "olmo2",
    "olmo3",
    "smollm3",
    "phi3",
    "phi3, longrope",
    "gemma3_text",
    "gpt_oss",
    "glm4_moe",
)


def same_logits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """To the bit. For families with eager attention, which adds up in another order, to 1e-5 of the largest."""
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()) if name in NEW else torch.equal(ours, theirs)


def kernel_of(name: str) -> str:
    return "eager" if name in NEW else "sdpa"


def ours_of(name: str) -> Model:
    return shape(context=CONTEXT, ffn=40, **FAMILIES[name][0])


def built(name: str) -> Decoder:
    """A decoder with random vectors: initially, norms and biases have no effect."""
    model = decoder(ours_of(name))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.state_dict().values():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def theirs_of(name: str, **changed: object) -> PreTrainedModel:
    """A random model, created by `transformers`, with changed settings."""
    overrides = FAMILIES[name][1]
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "eos_token_id": 0, "bos_token_id": 0,
        "tie_word_embeddings": FAMILIES[name][0].get("tie_embeddings", True), "num_key_value_heads": 4,
    }  # fmt: skip
    torch.manual_seed(0)
    merged = {**settings, **overrides, **changed}
    settings_of_theirs = AutoConfig.for_model(merged.pop("model_type", "llama"), **merged)
    reference = AutoModelForCausalLM.from_config(
        settings_of_theirs, attn_implementation=kernel_of(name), dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reference.state_dict().values():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return reference
