"""The `model` section: the shape of a decoder of a widely used family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from holdfast.spec.section import Section

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "dots1")  # families with experts


class RopeScaling(Section):
    """Scaling of rotary frequencies, for contexts beyond those that the model was first trained on."""

    kind: Literal["none", "linear", "llama3"] = Field(
        "none",
        description="`linear` divides every frequency by `factor`. `llama3` divides only low ones, as Llama 3.1.",
    )
    factor: float = Field(1.0, gt=0, description="Divisor of the frequencies (kind: linear or llama3).")
    low_frequency_factor: float = Field(
        1.0, gt=0, description="Wavelengths above `original_context` / this are scaled fully (kind: llama3)."
    )
    high_frequency_factor: float = Field(
        4.0, gt=0, description="Wavelengths below `original_context` / this are not scaled (kind: llama3)."
    )
    original_context: int = Field(
        8192, ge=1, le=2**31, description="The context that the model was first trained on, in tokens (kind: llama3)."
    )


class Routing(Section):
    """How tokens are routed to experts, and how the load is balanced (`model.experts`). No token is ever dropped."""

    top_k: int = Field(2, ge=1, le=10_000, description="Routed experts for each token.")
    normalise: bool = Field(True, description="The weights of a token's experts sum to 1. In `mixtral` they always do.")
    shared: int = Field(
        0, ge=0, le=1000, description="Additional experts that process every token (qwen2_moe and dots1)."
    )
    balance: Literal["auxiliary", "bias", "none"] = Field(
        "auxiliary",
        description="`auxiliary` adds the gradient of a loss on each sequence's imbalance between experts (Switch "
        "Transformer). `bias` changes the bias of each expert by `bias_step` after each step, toward equal load "
        "(DeepSeek-V3). `bias` is for dots1, whose weights contain the biases.",
    )
    coefficient: float = Field(0.01, ge=0, description="Weight of the imbalance of a layer (balance: auxiliary).")
    bias_step: float = Field(0.001, ge=0, description="Change of an expert's bias in one step (balance: bias).")


LEAST_HIDDEN = 8


class Model(Section):
    """A decoder of the Llama family or a related one. The vocabulary comes from the tokenizer."""

    family: Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "dots1"] = Field(
        "llama",
        description="Model family. `qwen2` has biases on queries, keys and values. `qwen3` normalizes queries and "
        "keys. `mistral` may have a sliding window. `mixtral`, `qwen2_moe`, `qwen3_moe` and `dots1` are mixtures of "
        "experts. Exported models have this name.",
    )

    layers: int = Field(4, ge=1, le=1000, description="Decoder layers.")
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
    sliding_window: int | None = Field(
        None, ge=1, le=1_048_576, description="Tokens that a token attends to, itself included. Default: all before it."
    )
    norm_epsilon: float = Field(1e-5, gt=0, lt=1, description="Epsilon of RMSNorm.")
    tie_embeddings: bool = Field(True, description="Use the token embedding as the output head.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    init_from: str | None = Field(
        None,
        description="Hugging Face weights to start from: a folder, s3:// or hf://owner/name[@revision]. Default: "
        "random weights.",
    )
    experts: int = Field(1, ge=1, le=10_000, description="Experts of each feed-forward layer; 1 is a dense model.")
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
    def attention_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.family in ("qwen2", "qwen2_moe")

    @property
    def query_key_norm(self) -> bool:
        """Whether queries and keys are normalized, separately for each head."""
        return self.family in ("qwen3", "qwen3_moe", "dots1")

    @property
    def normalised(self) -> bool:
        """Whether the weights of a token's experts sum to 1."""
        return self.routing.normalise or self.family == "mixtral"

    @property
    def biased_routing(self) -> bool:
        """Whether routers score by sigmoids and have a bias that no gradient changes."""
        return self.family == "dots1"
