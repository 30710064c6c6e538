"""The `model` section: the shape of a decoder of a widely used family."""

import math
from typing import Literal, NamedTuple

from pydantic import Field, PositiveFloat

from holdfast.spec.families import PRESETS, Family, LayerKind, Preset
from holdfast.spec.section import Section

# kinds of scaling, and the fields that each one needs and may have
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_frequency_factor", "high_frequency_factor", "original_context"),
    "yarn": ("factor", "original_context", "beta_fast", "beta_slow", "truncate", "attention_factor", "score_factor"),
    "longrope": ("factor", "original_context", "short_factors", "long_factors", "attention_factor"),
}


class LayerShape(NamedTuple):
    """The shape of one layer, where layers differ."""

    window: int | None  # tokens that a token attends to, itself included; None: all before it
    rope: Literal["main", "local", "none"]  # the rotary table
    mixture: bool  # experts in place of a dense feed-forward layer


class RopeScaling(Section):
    """Scaling of rotary frequencies, for contexts beyond those that the model was first trained on."""

    kind: Literal["none", "linear", "llama3", "yarn", "longrope"] = Field(
        "none",
        description="`linear` divides every frequency by `factor`. `llama3` divides only low ones, as Llama 3.1. "
        "`yarn` divides low ones and sharpens attention. `longrope` divides each one by a number from a list.",
    )
    factor: float = Field(
        1.0, gt=0, description="Divisor of the frequencies. For `longrope`: full context / original context."
    )
    low_frequency_factor: float = Field(
        1.0, gt=0, description="Wavelengths above `original_context` / this are scaled fully (kind: llama3)."
    )
    high_frequency_factor: float = Field(
        4.0, gt=0, description="Wavelengths below `original_context` / this are not scaled (kind: llama3)."
    )
    original_context: int = Field(
        8192, ge=1, le=2**31, description="The context that the model was first trained on, in tokens."
    )
    beta_fast: float = Field(
        32.0, gt=0, description="Frequencies with more rotations than this in `original_context` stay (kind: yarn)."
    )
    beta_slow: float = Field(
        1.0, gt=0, description="Frequencies with fewer rotations than this are divided fully (kind: yarn)."
    )
    truncate: bool = Field(True, description="Round those two bounds to whole frequencies (kind: yarn).")
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="Factor of cosines and sines (kind: yarn or longrope). Default: the formula of the paper, from "
        "`factor`.",
    )
    score_factor: float = Field(
        0.0,
        ge=0,
        description="Attention scores are multiplied by the square of 0.1 × this × ln(`factor`) + 1 (kind: yarn; "
        "deepseek_v3).",
    )
    short_factors: tuple[PositiveFloat, ...] = Field(
        (),
        max_length=32_768,
        description="Divisors of the frequencies for a context up to `original_context` (kind: longrope).",
    )
    long_factors: tuple[PositiveFloat, ...] = Field(
        (), max_length=32_768, description="Divisors of the frequencies for a longer context (kind: longrope)."
    )


class Routing(Section):
    """How tokens are routed to experts, and how the load is balanced (`model.experts`). No token is ever dropped."""

    top_k: int = Field(2, ge=1, le=10_000, description="Routed experts for each token.")
    normalise: bool = Field(True, description="The weights of a token's experts sum to 1. In `mixtral` they always do.")
    shared: int = Field(
        0,
        ge=0,
        le=1000,
        description="Additional experts that process every token (qwen2_moe, dots1, glm4_moe, deepseek_v3).",
    )
    groups: int = Field(
        1,
        ge=1,
        le=10_000,
        description="Groups of experts. Only experts of the best groups are chosen (router of DeepSeek).",
    )
    top_groups: int = Field(1, ge=1, le=10_000, description="Groups whose experts a token may choose.")
    scale: float = Field(
        1.0, gt=0, description="Factor of the results of routed experts (dots1, glm4_moe, deepseek_v3)."
    )
    balance: Literal["auxiliary", "bias", "none"] = Field(
        "auxiliary",
        description="`auxiliary` adds the gradient of a loss on each sequence's imbalance between experts (Switch "
        "Transformer). `bias` changes the bias of each expert by `bias_step` after each step, toward equal load "
        "(DeepSeek-V3). `bias` is for dots1, glm4_moe and deepseek_v3, whose weights contain the biases.",
    )
    coefficient: float = Field(0.01, ge=0, description="Weight of the imbalance of a layer (balance: auxiliary).")
    bias_step: float = Field(0.001, ge=0, description="Change of an expert's bias in one step (balance: bias).")


class Latent(Section):
    """Widths of attention with latents (deepseek_v3). `model.head_dim` is the width of a query or key."""

    query: int = Field(1536, ge=0, le=1_000_000, description="Width of the latent of queries. 0: none.")
    key_value: int = Field(512, ge=1, le=1_000_000, description="Width of the latent of keys and values.")
    rope: int = Field(64, ge=2, le=65_536, description="The rotated part of `head_dim`, which all heads' keys share.")
    value: int = Field(128, ge=1, le=65_536, description="Width of a head's values.")


LARGEST_HEAD = 256  # the largest head width of the flash kernel, which computes attention in 16 bits on CUDA
WHOLE_ROW = 1024  # tokens from which the flash kernel's backward makes two sums of a document that fills its row
LONG_DOCUMENT = 16384  # tokens from which a document has a separate call of that kernel's backward (decision 043)
LEAST_HIDDEN, MOST_LAYERS = 8, 1000


class Model(Section):
    """A decoder of the Llama family or a related one. The vocabulary comes from the tokenizer."""

    family: Family = Field(
        "llama",
        description="Model family, which fixes the switches that its weights imply (`docs/models.md`). Exported models "
        "have this name.",
    )

    layers: int = Field(4, ge=1, le=MOST_LAYERS, description="Decoder layers.")
    hidden: int = Field(256, ge=LEAST_HIDDEN, le=1_000_000, description="Width of the residual stream.")
    heads: int = Field(4, ge=1, le=10_000, description="Attention (query) heads.")
    kv_heads: int | None = Field(
        None, ge=1, le=10_000, description="Key/value heads (grouped-query attention). Default: `heads`."
    )
    head_dim: int | None = Field(
        None, ge=2, le=65_536, description="Width of one attention head. Default: `hidden` / `heads`."
    )
    ffn: int | None = Field(
        None,
        ge=8,
        le=10_000_000,
        description="Width of the SwiGLU layer, or of one expert. Default: 8/3 of `hidden`, rounded up to a multiple "
        "of 32.",
    )
    context: int = Field(256, ge=8, le=1_048_576, description="Sequence length, in tokens.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    rope_scaling: RopeScaling = Field(default_factory=RopeScaling, description="Scaling of those frequencies.")
    rope_local_theta: float | None = Field(
        None,
        gt=0,
        description="Base of the frequencies in sliding layers, which are not scaled (olmo3 and gemma3_text). Default: "
        "`rope_theta`.",
    )
    rotary_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of a head's width that is rotated (phi3 and glm4_moe)."
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        le=1_048_576,
        description="Tokens that a token attends to, itself included, in sliding layers. Default: all before it.",
    )
    layer_pattern: tuple[LayerKind, ...] | None = Field(
        None,
        min_length=1,
        max_length=1000,
        description="Kinds of layers, repeated: `full` attention, `sliding` with the window, or `no_rope` (full, "
        "without positions). Default: that of the family.",
    )
    latent: Latent = Field(default_factory=Latent, description="Attention with latents (deepseek_v3).")
    query_scalar: float | None = Field(
        None,
        gt=0,
        description="Attention scores are divided by its square root (gemma3_text). Default: `head_dim`.",
    )
    attention_bias: bool = Field(False, description="Biases on queries, keys and values (glm4_moe).")
    query_key_norm: bool = Field(False, description="Norms of queries and keys, per head (glm4_moe).")
    norm_epsilon: float = Field(1e-5, gt=0, lt=1, description="Epsilon of RMSNorm.")
    tie_embeddings: bool = Field(True, description="Use the token embedding as the output head.")
    head: Literal["tokens", "scalar"] = Field(
        "tokens",
        description="`tokens`: the model predicts the next token. `scalar`: it gives one number for each text, as a "
        "reward model does (`training.objective: reward`). Its weights are new if `init_from` has none.",
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    init_from: str | None = Field(
        None,
        description="Hugging Face weights to start from: a folder, s3:// or hf://owner/name[@revision][/folder]. "
        "Default: random weights.",
    )
    export_dtype: Literal["fp32", "bf16", "base"] = Field(
        "fp32",
        description="Type of the exported weights, rounded once from fp32. `base`: that of `init_from`, by its "
        "config.json.",
    )
    experts: int = Field(1, ge=1, le=10_000, description="Experts of each feed-forward layer; 1 is a dense model.")
    dense_layers: int = Field(
        0,
        ge=0,
        le=1000,
        description="First layers without experts (dots1, glm4_moe, deepseek_v3), of width `dense_ffn`.",
    )
    dense_ffn: int | None = Field(
        None, ge=8, le=10_000_000, description="Width of the feed-forward layer in `dense_layers`. Default: `ffn`."
    )
    routing: Routing = Field(default_factory=Routing, description="How tokens are routed to experts.")

    @property
    def key_value_heads(self) -> int:
        """Key/value heads, with the default resolved."""
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer, with the default resolved."""
        if self.ffn is not None:
            return self.ffn
        return -(-(self.hidden * 8 // 3) // 32) * 32

    @property
    def head_width(self) -> int:
        """Width of one attention head, with the default resolved."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def dense_width(self) -> int:
        """Width of the feed-forward layer in layers without experts, with the default resolved."""
        return self.ffn_width if self.experts == 1 or self.dense_ffn is None else self.dense_ffn

    @property
    def preset(self) -> Preset:
        """The switches that the family fixes."""
        return PRESETS[self.family]

    @property
    def biases(self) -> Literal["none", "qkv", "qkvo"]:
        """The attention matrices that have biases."""
        return "qkv" if self.attention_bias else self.preset.biases

    @property
    def query_key_norms(self) -> Literal["none", "head", "whole"]:
        """Norms of queries and keys: separately for each head, or over the whole width."""
        return "head" if self.query_key_norm else self.preset.query_key_norm

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        every: LayerKind = "full" if self.sliding_window is None else "sliding"
        pattern = self.layer_pattern or self.preset.pattern or (every,)
        return tuple(pattern[index % len(pattern)] for index in range(self.layers))

    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The shape of each layer."""
        local: Literal["main", "local"] = "local" if self.preset.local_rope else "main"
        return tuple(
            LayerShape(
                window=self.sliding_window if kind == "sliding" else None,
                rope="none" if kind == "no_rope" else local if kind == "sliding" else "main",
                mixture=self.experts > 1 and index >= self.dense_layers,
            )
            for index, kind in enumerate(self.layer_kinds)
        )

    @property
    def packable(self) -> bool:
        """Whether generation on the CPU packs the layers: narrow, dense ones with the operations of Llama, Mistral or
        Qwen (also phi3 with heads that are rotated whole, and smollm3 with all layers rotated)."""
        preset, layers = self.preset, self.layer_shapes()
        return (
            self.hidden < 1024  # packed matrices of more columns are no faster
            and preset.norms == "pre"
            and preset.activation == "silu"
            and not preset.latent
            and self.query_key_norms != "whole"
            and self.biases != "qkvo"
            and self.rotary_width == self.head_width
            and all(layer.rope == "main" and not layer.mixture for layer in layers)
        )

    @property
    def rotary_width(self) -> int:
        """The part of a head that is rotated."""
        return self.latent.rope if self.preset.latent else int(self.head_width * self.rotary_fraction)

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.latent.value if self.preset.latent else self.head_width

    @property
    def attention_scale(self) -> float | None:
        """Factor of attention scores. None: that of the head's width."""
        if self.query_scalar is not None:
            return float(self.query_scalar**-0.5)
        if not self.rope_scaling.score_factor:
            return None
        return float(
            self.head_width**-0.5 * (0.1 * self.rope_scaling.score_factor * math.log(self.rope_scaling.factor) + 1) ** 2
        )

    @property
    def normalised(self) -> bool:
        """Whether the weights of a token's experts sum to 1."""
        return self.routing.normalise or self.preset.normalised

    @property
    def biased_routing(self) -> bool:
        """Whether routers score by sigmoids and have a bias that no gradient changes."""
        return self.preset.router == "sigmoid"


def scaling_problem(shape: Model) -> tuple[str, float, str, str] | None:
    """The field whose logarithm a scaling divides by although it is 0: name, value, problem and remedy; or None."""
    scaling = shape.rope_scaling
    if scaling.kind == "yarn" and shape.rope_theta <= 1:
        return "rope_theta", shape.rope_theta, "gives no frequencies to scale", "use more than 1"
    if scaling.kind == "longrope" and scaling.original_context == 1 and scaling.attention_factor is None:
        return "original_context", 1, "is no context", "use that of the original model"
    return None
