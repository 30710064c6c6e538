"""The model families: the switches of a decoder that each one fixes."""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["full", "sliding", "no_rope"]
Family = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "dots1",
    "olmo2",
    "olmo3",
    "smollm3",
    "phi3",
    "gemma3_text",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
]


@dataclass(frozen=True)
class Preset:
    """The switches of a decoder that a family fixes. The defaults are those of Llama."""

    mixture: bool = False
    pattern: tuple[LayerKind, ...] = ()  # the kinds of layers if the spec has none; empty: all of one kind
    norms: Literal["pre", "post", "both"] = "pre"  # before attention and feed-forward, after them, or both
    norm_offset: float = 0.0  # added to the weights of norms
    norm_in_fp32: bool = False  # norms multiply by their weights before they round
    query_key_norm: Literal["none", "head", "whole"] = "none"  # per head, or over the whole width
    biases: Literal["none", "qkv", "qkvo"] = "none"  # of the attention matrices
    activation: Literal["silu", "gelu_tanh", "clamped"] = "silu"
    router: Literal["softmax", "sigmoid", "chosen"] = "softmax"  # `chosen`: softmax over the chosen experts only
    shared: Literal["none", "plain", "weighted"] = "none"  # additional experts for every token
    sinks: bool = False  # a learned score per head that takes attention away from all tokens
    scaled_embedding: bool = False  # embeddings are multiplied by the square root of the width
    local_rope: bool = False  # sliding layers rotate without scaling, by `rope_local_theta`
    normalised: bool = False  # the weights of a token's experts always sum to 1
    dense_first: bool = False  # the first layers may be dense, and experts have groups
    scalar_head: bool = False  # `transformers` has a class with a scalar head
    longrope: bool = False  # rotary frequencies may be scaled each by its number
    latent: bool = False  # queries, keys and values come from narrow latents, and pairs to rotate alternate
    fields: tuple[str, ...] = ()  # fields of the spec that not every family has


_SLIDING = ("layer_pattern", "sliding_window")
PRESETS: dict[str, Preset] = {
    "llama": Preset(scalar_head=True, fields=("head_dim",)),
    "mistral": Preset(scalar_head=True, fields=("head_dim", "sliding_window")),
    "qwen2": Preset(biases="qkv", scalar_head=True),
    "qwen3": Preset(query_key_norm="head", scalar_head=True, fields=("head_dim",)),
    "mixtral": Preset(mixture=True, scalar_head=True, normalised=True, fields=("head_dim", "sliding_window")),
    "qwen2_moe": Preset(mixture=True, scalar_head=True, biases="qkv", shared="weighted"),
    "qwen3_moe": Preset(mixture=True, scalar_head=True, query_key_norm="head", fields=("head_dim",)),
    "dots1": Preset(mixture=True, query_key_norm="head", router="sigmoid", shared="plain", dense_first=True),
    "olmo2": Preset(norms="post", norm_in_fp32=True, query_key_norm="whole", scalar_head=True),
    "olmo3": Preset(
        norms="post",
        norm_in_fp32=True,
        query_key_norm="whole",
        pattern=("sliding", "sliding", "sliding", "full"),
        local_rope=True,
        scalar_head=True,
        fields=(*_SLIDING, "rope_local_theta"),
    ),
    "smollm3": Preset(pattern=("full", "full", "full", "no_rope"), scalar_head=True, fields=("layer_pattern",)),
    "phi3": Preset(scalar_head=True, longrope=True, fields=("sliding_window", "rotary_fraction")),
    "gemma3_text": Preset(
        norms="both",
        norm_offset=1.0,
        norm_in_fp32=True,
        query_key_norm="head",
        pattern=("sliding", "sliding", "sliding", "sliding", "sliding", "full"),
        activation="gelu_tanh",
        scaled_embedding=True,
        local_rope=True,
        scalar_head=True,
        fields=(*_SLIDING, "head_dim", "rope_local_theta", "query_scalar"),
    ),
    "gpt_oss": Preset(
        mixture=True,
        scalar_head=True,
        norm_in_fp32=True,
        pattern=("sliding", "full"),
        biases="qkvo",
        activation="clamped",
        router="chosen",
        normalised=True,
        sinks=True,
        fields=(*_SLIDING, "head_dim"),
    ),
    "glm4_moe": Preset(
        mixture=True,
        router="sigmoid",
        shared="plain",
        dense_first=True,
        fields=("head_dim", "rotary_fraction", "attention_bias", "query_key_norm"),
    ),
    "deepseek_v3": Preset(
        mixture=True,
        scalar_head=True,
        router="sigmoid",
        shared="plain",
        dense_first=True,
        latent=True,
        fields=("head_dim", "latent"),
    ),
}
MIXTURES = tuple(family for family, preset in PRESETS.items() if preset.mixture)
DENSE_FIRST = tuple(family for family, preset in PRESETS.items() if preset.dense_first)
SCALAR_HEADS = tuple(family for family, preset in PRESETS.items() if preset.scalar_head)
