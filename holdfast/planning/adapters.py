"""Elements of adapters (LoRA), and of what they keep for each token."""

from __future__ import annotations

from holdfast.planning.layout import Layout
from holdfast.planning.shape import Architecture
from holdfast.spec.training import Lora

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def adapter_elements(shape: Architecture, layout: Layout, lora: Lora, mixed: int, plain: int) -> tuple[float, float]:
    """Elements of the adapters of `mixed` layers with experts (of a dense model: all layers) and `plain` ones without,
    on one rank before sharding: those that tensor parallelism splits, and those of experts, which it does not. It
    splits one matrix of an adapter."""
    hidden, cut = shape.hidden, layout.tensor
    value = shape.latent[3] * shape.heads if shape.latent is not None else shape.query_width
    widths = {"q_proj": shape.query_width, "k_proj": shape.key_width, "v_proj": shape.key_width, "o_proj": value}
    attention = sum(hidden + widths[name] / cut for name in lora.targets if name in widths)
    count = sum(name in lora.targets for name in _FEED_FORWARD)
    of_experts, width = 0.0, shape.ffn
    if shape.experts > 1:
        width = shape.shared * shape.ffn
        gate_up = hidden + 2 * shape.ffn if "gate_proj" in lora.targets else 0
        down = hidden + shape.ffn if "down_proj" in lora.targets else 0
        of_experts = mixed * shape.experts / layout.expert * (gate_up + down)
    feed_forward = mixed * (hidden + width / cut) * (width > 0) + plain * (hidden + shape.dense_ffn / cut)
    rank = lora.rank or 0
    return rank * ((mixed + plain) * attention + count * feed_forward), rank * of_experts


def adapter_activations(shape: Architecture, lora: Lora) -> float:
    """Elements of a token that the first matrices of a layer's adapters return."""
    feed_forward = sum(name in lora.targets for name in _FEED_FORWARD)
    matrices = len(lora.targets) - feed_forward
    if shape.experts == 1:
        matrices += feed_forward
    else:  # gate and up of an expert have one adapter
        matrices += feed_forward * (shape.shared > 0)
        matrices += shape.active * sum(name in lora.targets for name in ("gate_proj", "down_proj"))
    return (lora.rank or 0) * matrices
