"""What a layer keeps for its backward pass on one rank, and what that pass needs besides, in bytes.

Activations follow Korthikanti 2022 (arXiv 2205.05198, section 4): what each operation keeps for its backward pass. Here
they are for a Llama-like decoder (grouped queries, SwiGLU, attention that never stores its scores). The same terms
describe the GPT of that paper. Tensor parallelism includes sequence parallelism and divides all activations of a layer.
"""

from math import ceil

from holdfast.planning.adapters import adapted_activations, adapter_activations, adapter_results
from holdfast.planning.layout import Layout
from holdfast.planning.practice import Practice
from holdfast.planning.shape import Architecture
from holdfast.spec.model import LONG_DOCUMENT, WHOLE_ROW

TILE = 256  # queries of a block of attention (`model.attention.tiles`)
PROCESSORS = 132  # of a large CUDA device
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0}  # of an activation; fp8 is for products alone


def layer_activations(
    shape: Architecture, layout: Layout, precision: str, practice: Practice, checkpointing: str | None = None
) -> float:
    """Bytes that a layer keeps per micro-batch on one rank, from its forward to its backward pass."""
    size = BYTES[precision]
    stream = 4.0 if practice.autocast else size
    wide = (3 if shape.gated else 1) + 1  # gate, up and the results of the two factors; or before and after GELU
    hidden, heads = shape.hidden, (2 * shape.query_width + 2 * shape.key_width) * size
    statistics = 4.0 * shape.heads if practice.flash else 0.0
    routed = 2 * hidden * size * shape.active if shape.experts > 1 else 0.0  # inputs and outputs of the experts
    kind = checkpointing or layout.checkpointing
    if kind == "full":
        per_token = hidden * stream
    elif kind == "selective" and practice.selective == "products":
        kept = _products(shape) + adapter_activations(shape, practice.lora) + adapter_results(shape, practice.lora)
        logits = 4.0 * shape.experts if shape.experts > 1 else 0.0  # of the router
        per_token = hidden * stream + heads + statistics + kept * size + logits
    else:
        frozen = practice.lora.rank is not None  # the gradient of a norm's weights needs the normalized copy
        compiled = counts_as_compiled(layout, practice) and layout.checkpointing == "none" and not frozen
        copies = 1 if practice.fused_norm or frozen or compiled else 2
        norms = shape.norms * hidden * stream * copies + 8
        inputs = hidden * size * (5 if practice.autocast else 2)
        if compiled:
            # A norm within the layer reads a sum, of which the compiler keeps the result of a product. Casts are shared
            # and the activation is recomputed, but its product with `up` is kept: products read both.
            norms = hidden * (stream + (shape.norms - 1) * size) + 8
            inputs, wide = hidden * size * 2, wide - 1 if shape.gated else wide
        scores = (
            0.0 if practice.flash or kind == "selective" else (2 * size + shape.dropout) * shape.heads * shape.context
        )
        masks = 2 * hidden if shape.dropout else 0.0
        if shape.query_norm != "none":
            norms += (shape.query_width + shape.key_width) * size * copies
        heads += 2 * shape.key_width * size * (layout.context - 1)  # keys and values of the whole sequence
        feed_forward = wide * shape.ffn * size * shape.met
        per_token = norms + inputs + heads + statistics + scores + masks + feed_forward + routed
        if frozen:
            kept = adapted_activations(shape, practice.lora, autocast=practice.autocast)
            per_token = norms + heads + statistics + scores + kept * size
    return per_token * tokens_of(shape, layout)


def counts_as_compiled(layout: Layout, practice: Practice) -> bool:
    """Whether the terms of compiled layers and of a compiled loss apply. They were compared with one device only. Where
    ranks share a layer or a sequence, the larger terms of separate operations count."""
    return practice.compiled and layout.tensor == 1 and layout.context == 1


def _products(shape: Architecture) -> float:
    """Elements of a token in the results of a layer's matrix products, besides queries, keys and values."""
    results = shape.active + (shape.shared > 0) if shape.experts > 1 else 1  # of the hidden width
    return shape.hidden * (1 + results) + shape.met * shape.ffn * (2 if shape.gated else 1) + shape.gated_shared


def tokens_of(shape: Architecture, layout: Layout) -> float:
    """Tokens of a micro-batch whose activations one rank holds."""
    return layout.micro_batch * shape.context / (layout.context * layout.tensor)


def attention_backward(shape: Architecture, layout: Layout, precision: str, practice: Practice) -> float:
    """Bytes of the backward pass of a layer's attention on one rank: the gradients of its output and inputs, and what
    the kernel needs. A document is assumed to be as long as its row, which is the upper bound."""
    size, queries = BYTES[precision], shape.query_width
    keys = 2 * shape.key_width * layout.context  # keys and values of the whole sequence
    repeated = 2 * queries * layout.context * size if shape.kv_heads < shape.heads else 0.0  # one of each for each head
    row = 1 / layout.micro_batch  # tiles compute one row after another
    per_token = (2 * queries + keys) * size
    if not practice.flash:
        return per_token * tokens_of(shape, layout)
    if practice.kernel == "flash":
        heads = shape.heads / layout.tensor
        whole_row = 2 if shape.context >= WHOLE_ROW and heads < PROCESSORS else 1
        sums = ceil(PROCESSORS / heads) if shape.context >= LONG_DOCUMENT else whole_row
        per_token += 4 * queries * sums + repeated
    else:
        per_token += keys * (4.0 if size < 4 else 0.0)  # sums in fp32
        per_token += row * (queries + (keys if practice.kernel == "cpu" else 2 * repeated or keys)) * size
    if practice.kernel == "plain":  # scores of a block in fp32: with their exponentials, and the gradients of both
        per_token += row * 4 * 4.0 * TILE * shape.heads
    return per_token * tokens_of(shape, layout)
