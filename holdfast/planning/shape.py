"""Shape of the model for the planner: parameters and cost per token, in closed form.

The parameter counts equal those of `holdfast/model`. Published GPT models (two matrices in the feed-forward layer,
biases, learned positions, dropout) are also described, to check published tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.spec.model import Model


@dataclass(frozen=True)
class Architecture:
    """A decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # width of the feed-forward layer, or of one expert
    context: int  # tokens per sequence
    vocabulary: int
    tied: bool = False
    gated: bool = True  # SwiGLU: three matrices instead of two
    experts: int = 1
    active: int = 1  # experts per token
    shared: int = 0  # additional experts for every token
    gated_shared: bool = False  # their result is weighted (Qwen2-MoE)
    biased: bool = False  # GPT: biases, LayerNorm with two vectors, learned positions
    dropout: bool = False  # GPT: three masks per layer, one byte per element
    head_dimension: int | None = None
    query_bias: bool = False  # bias of queries, keys and values (Qwen2)
    query_norm: Literal["none", "head", "whole"] = "none"  # norms of queries and keys, per head or over the whole width
    norms: int = 2  # of a layer, of the hidden width
    output_bias: bool = False  # bias of the attention's output (gpt-oss)
    sinks: bool = False  # one number per head (gpt-oss)
    expert_bias: bool = False  # biases of experts and router (gpt-oss)
    latent: tuple[int, int, int, int] | None = None  # widths of the latents and of a head's rotated part and values
    dense_layers: int = 0  # first layers without experts
    dense_ffn: int = 0  # their width
    packable: bool = False  # generation on the CPU packs its matrices
    windows: tuple[int, ...] = ()  # positions that a token sees at most, in each layer; empty: all

    @classmethod
    def of(cls, model: Model, vocabulary: int) -> Architecture:
        """The architecture of a spec's model."""
        windows = tuple(min(layer.window or model.context, model.context) for layer in model.layer_shapes())
        return cls(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.key_value_heads,
            ffn=model.ffn_width,
            context=model.context,
            vocabulary=vocabulary,
            tied=model.tie_embeddings,
            experts=model.experts,
            active=min(model.experts, model.routing.top_k),
            shared=model.routing.shared,
            gated_shared=model.preset.shared == "weighted",
            head_dimension=model.head_dim,
            query_bias=model.biases != "none",
            query_norm=model.query_key_norms,
            norms=4 if model.preset.norms == "both" else 2,
            output_bias=model.biases == "qkvo",
            sinks=model.preset.sinks,
            expert_bias=model.experts > 1 and model.preset.activation == "clamped",
            latent=tuple(model.latent.model_dump().values()) if model.preset.latent else None,
            dense_layers=model.dense_layers,
            dense_ffn=model.dense_width if model.dense_layers else 0,
            packable=model.packable,
            windows=windows if min(windows, default=model.context) < model.context else (),
        )

    @property
    def cut_ffn(self) -> int:
        """Feed-forward columns that tensor parallelism divides; in a mixture, only those of its shared experts."""
        return self.ffn * (self.shared if self.experts > 1 else 1)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dimension or self.hidden // self.heads

    @property
    def query_width(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Width of all keys of a token, and of all values."""
        return self.kv_heads * self.head_width

    @property
    def attention_weights(self) -> int:
        """Elements of a layer's attention matrices."""
        if self.latent is not None:
            query, key_value, rope, value = self.latent
            queries = query * (self.hidden + self.query_width) if query else self.hidden * self.query_width
            keys = self.hidden * (key_value + rope) + key_value * self.heads * (self.head_width - rope + value)
            return queries + keys + self.heads * value * self.hidden
        return self.hidden * (2 * self.query_width + 2 * self.key_width)

    @property
    def expert_weights(self) -> int:
        """Elements of a feed-forward layer's matrices, or of an expert."""
        biases = 2 * self.ffn + self.hidden if self.expert_bias else 0
        return (3 if self.gated else 2) * self.hidden * self.ffn + biases

    @property
    def vectors(self) -> int:
        """Elements of a layer that are never split: norms, biases, the router."""
        biases = self.query_width + 2 * self.key_width + self.ffn + 4 * self.hidden if self.biased else 0
        biases += self.query_width + 2 * self.key_width if self.query_bias else 0
        biases += (self.hidden if self.output_bias else 0) + (self.heads if self.sinks else 0)
        normed = {"none": 0, "head": 2 * self.head_width, "whole": self.query_width + self.key_width}
        norms = self.norms * self.hidden + normed[self.query_norm] + sum(self.latent[:2] if self.latent else ())
        return norms + biases + self.router

    @property
    def router(self) -> int:
        """Elements of a layer's router."""
        rows = self.experts + self.gated_shared
        return self.hidden * rows + (self.experts if self.expert_bias else 0) if self.experts > 1 else 0

    @property
    def layer_parameters(self) -> int:
        """Elements of a layer; in a mixture, of a layer with experts."""
        return self.attention_weights + (self.experts + self.shared) * self.expert_weights + self.vectors

    @property
    def dense_layer_parameters(self) -> int:
        """Elements of one of the `dense_layers`."""
        return self.attention_weights + 3 * self.hidden * self.dense_ffn + self.vectors - self.router

    @property
    def met(self) -> int:
        """Experts that process a token."""
        return self.active + self.shared

    @property
    def embedding(self) -> int:
        """Elements of the token embedding, and of the head if it is a separate matrix."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> int:
        """Elements of the matrices that a token is multiplied by in a model without experts, the head included."""
        return self.layers * (self.attention_weights + self.expert_weights) + self.embedding

    @property
    def positions(self) -> int:
        """Elements of learned positions."""
        return self.context * self.hidden if self.biased else 0

    @property
    def parameters(self) -> int:
        """All elements."""
        ends = self.embedding * (1 if self.tied else 2) + self.positions + (2 if self.biased else 1) * self.hidden
        mixed = self.layers - self.dense_layers
        return mixed * self.layer_parameters + self.dense_layers * self.dense_layer_parameters + ends

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses."""
        return self.parameters - (self.layers - self.dense_layers) * (self.experts - self.active) * self.expert_weights

    def layer_products(self) -> float:
        """FLOPs of a layer's matrix products for one token, forward."""
        return 2.0 * (self.attention_weights + self.met * self.expert_weights)

    def attention_products(self, *, causal: bool) -> float:
        """FLOPs of a layer's attention for one token, forward: scores and weighted values. `causal` kernels skip the
        positions that a token does not see.
        """
        keys = float(self.context)
        if causal:
            windows = self.windows or (self.context,)
            keys = sum(window * (1 - 0.5 * window / self.context) for window in windows) / len(windows)
        return 4.0 * keys * self.query_width

    def head_products(self) -> float:
        """FLOPs of the output head for one token, forward."""
        return 2.0 * self.embedding

    def model_products(self) -> float:
        """FLOPs of one token, forward and backward, that the model needs; the basis of MFU (PaLM, appendix B;
        Megatron-LM, SC'21).

        Attention is counted in full, and recomputation is not counted.
        """
        layer = self.layer_products() + self.attention_products(causal=False)
        wider = 3 * self.hidden * self.dense_ffn - self.met * self.expert_weights  # a dense layer than one with experts
        return 3.0 * (self.layers * layer + self.dense_layers * 2.0 * wider + self.head_products())
