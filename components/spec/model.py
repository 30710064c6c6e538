"""The `model` section: the shape of a Llama-family decoder."""

from __future__ import annotations

from pydantic import Field

from holdfast.components.spec.section import Section


class Model(Section):
    """A Llama-family decoder. The vocabulary comes from the tokenizer."""

    layers: int = Field(4, ge=1, le=1000, description="Decoder layers.")
    hidden: int = Field(256, ge=8, le=1_000_000, description="Width of the residual stream.")
    heads: int = Field(4, ge=1, le=10_000, description="Attention (query) heads.")
    kv_heads: int | None = Field(
        None, ge=1, le=10_000, description="Key/value heads (grouped-query attention); none means `heads`."
    )
    ffn: int | None = Field(
        None,
        ge=8,
        le=10_000_000,
        description="Width of the SwiGLU layer; none means 8/3 of `hidden`, rounded up to a multiple of 32.",
    )
    context: int = Field(256, ge=8, le=1_048_576, description="Sequence length, in tokens.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    norm_epsilon: float = Field(1e-5, gt=0, lt=1, description="Epsilon of RMSNorm.")
    tie_embeddings: bool = Field(True, description="Use the token embedding as the output head.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")
    init_from: str | None = Field(
        None, description="Start from these Hugging Face weights (a folder or s3:// URL) instead of random ones."
    )
    experts: int = Field(1, ge=1, le=10_000, description="Experts of each feed-forward layer; 1 is a dense model.")

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
        """Width of one attention head."""
        return self.hidden // self.heads
