"""Elements of adapters (LoRA), and of what they keep for each token."""

from holdfast.planning.layout import Layout
from holdfast.planning.shape import Architecture
from holdfast.spec.training import Lora

_ATTENTION = {"q_proj", "k_proj", "v_proj"}  # that read the input of attention
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


def adapter_results(shape: Architecture, lora: Lora) -> float:
    """Elements of a token that the second matrices of a layer's adapters return."""
    if lora.rank is None:
        return 0.0
    hidden, ffn = shape.hidden, shape.ffn
    widths = {"q_proj": shape.query_width, "k_proj": shape.key_width, "v_proj": shape.key_width, "o_proj": hidden}
    results = sum(widths[name] for name in lora.targets if name in widths)
    gate_up, down = sum(name in lora.targets for name in ("gate_proj", "up_proj")), "down_proj" in lora.targets
    if shape.experts == 1:
        return results + gate_up * ffn + down * hidden
    results += shape.active * (2 * ffn * ("gate_proj" in lora.targets) + hidden * down)  # gate and up are one matrix
    return results + shape.shared * gate_up * ffn + (shape.shared > 0) * down * hidden


def adapted_activations(shape: Architecture, lora: Lora, *, autocast: bool) -> float:
    """Elements of a token that a layer with adapters keeps besides its norms and the heads of attention. The input of
    a matrix is kept only if it has an adapter: the gradient of its result needs the frozen matrix alone. With
    `autocast`, each matrix has a separate copy of its input."""
    targets = set(lora.targets)
    readers = [len(targets & _ATTENTION), len(targets & {"gate_proj", "up_proj"})]
    inputs, into = (shape.hidden * (count if autocast else min(count, 1)) for count in readers)
    inner = shape.ffn * (4 if "down_proj" in targets else 3)  # gate, its activation, up, and their product
    if shape.experts == 1:
        inputs += into + inner
    else:
        # An expert also keeps its result, for the gradient of its weight. Gate and up are one matrix.
        inputs += shape.active * (shape.hidden * (readers[1] > 0) + inner + shape.hidden)
        inputs += (into + shape.shared * inner) * (shape.shared > 0) + shape.hidden * shape.gated_shared
    return inputs + adapter_activations(shape, lora)


def freed_of_experts(shape: Architecture, lora: Lora) -> float:
    """Elements of a token that are freed before the backward pass of the experts' first matrices, more than the
    gradient of their result has: what lies between both matrices, and the results of the second ones."""
    return shape.active * (shape.ffn * (2 if "down_proj" in lora.targets else 1) + shape.hidden)


def before_adapters(shape: Architecture, lora: Lora, size: float, stream: float) -> float:
    """Bytes of a token that the first layer does not keep, because nothing is trained before its first adapter. They
    are `size` bytes an element, and those of the residual stream `stream`."""
    targets = set(lora.targets)
    norm = shape.hidden * stream + 4.0
    if targets & _ATTENTION:
        return norm
    attention = (shape.query_width + 2 * shape.key_width) * size + 4.0 * shape.heads
    if "o_proj" in targets:
        return norm + attention
    attention += shape.query_width * size
    results = shape.hidden * (shape.active * (shape.experts > 1) + shape.gated_shared) * size
    if targets & {"gate_proj", "up_proj"}:
        return 2 * norm + attention + results
    return 2 * norm + attention + results + 3 * shape.ffn * shape.met * size
