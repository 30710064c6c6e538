"""First weights of a model, and counts that need no weights.

A tensor is a pure function of (seed, canonical name, shape, spec). No rank, layout, thread count, device or order of
calls changes a bit, and any flat range can be generated without the rest. `hugging_face` loads other weights.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from holdfast.model.decoder import Decoder
from holdfast.model.experts import CORRECTION
from holdfast.spec.model import Model

BLOCK = 1 << 20  # elements per random stream; it determines the weights
AVERAGE = "ema."  # prefix of the canonical names of averages of weights


def initial_slice(name: str, shape: Sequence[int], model: Model, seed: int, *, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the flattened initial tensor `name`, fp32 on the CPU.

    Norms are 1 (Gemma's, which add 1: 0), biases and sinks 0. Matrices, including those of experts, are normal with
    `init_std`. Those that write to the residual stream (o_proj, down_proj) are scaled by 1/sqrt(2 * layers), as in
    GPT-2. So its variance does not grow with depth. An adapter's second matrix is 0, and its first one is uniform
    within 1/sqrt(its columns), as in `peft`. Raises ValueError for an invalid range.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: [{start}, {stop}) is not a range within its {size} elements")
    if len(shape) == 1:
        zero = name.endswith(("bias", ".sinks")) or model.preset.norm_offset
        return torch.zeros(stop - start) if zero else torch.ones(stop - start)
    if name.endswith("lora_B.weight"):
        return torch.zeros(stop - start)
    uniform, deviation = name.endswith("lora_A.weight"), model.init_std
    if name.removesuffix(".weight").endswith((".o_proj", ".down_proj")):
        deviation /= math.sqrt(2 * model.layers)
    values = np.empty(stop - start, dtype=np.float32)

    def fill(target: NDArray[np.float32], block: int) -> None:
        stream = _stream(name, seed, block)
        stream.random(out=target, dtype=np.float32) if uniform else stream.standard_normal(out=target, dtype=np.float32)

    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first, last = block * BLOCK, min((block + 1) * BLOCK, size)
        from_, upto = max(start, first), min(stop, last)
        if (from_, upto) == (first, last):
            fill(values[first - start : last - start], block)
        else:
            fill(block_values := np.empty(last - first, dtype=np.float32), block)
            values[from_ - start : upto - start] = block_values[from_ - first : upto - first]
    if uniform:
        values = (2 * values - 1) * np.float32(1 / math.sqrt(shape[1]))
    else:
        values *= np.float32(deviation)
    return torch.from_numpy(values)


def initial_tensor(name: str, shape: Sequence[int], model: Model, seed: int) -> Tensor:
    """The initial tensor of a canonical name: fp32, on the CPU."""
    return initial_slice(name, shape, model, seed, start=0, stop=math.prod(shape)).reshape(tuple(shape))


def initialise(decoder: Decoder, seed: int) -> None:
    """Fill a decoder on any device with its initial weights."""
    with torch.no_grad():
        for name, tensor in decoder.state_dict().items():
            tensor.copy_(initial_tensor(name, tensor.shape, decoder.shape, seed))


def parameter_shapes(model: Model, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Canonical names and global shapes, in canonical order, including tensors without a gradient (see `trained`).
    Allocates nothing."""
    with torch.device("meta"):
        decoder = Decoder(model, vocabulary)
    return {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}


def trained(name: str) -> bool:
    """Whether a gradient changes the tensor of this canonical name, so that it has optimizer moments."""
    return not name.endswith(CORRECTION)


def parameter_count(model: Model, vocabulary: int) -> int:
    """The number of trained parameters, including the embedding. A tied head counts once."""
    shapes = parameter_shapes(model, vocabulary)
    return sum(math.prod(shape) for name, shape in shapes.items() if trained(name))


def flops_per_token(model: Model, vocabulary: int, context: int | None = None) -> int:
    """Floating-point operations of forward and backward pass for one token of a sequence of `context` tokens.

    6 N + 12 L D T: six for every multiplied parameter, plus the attention scores and sums of L layers with heads of
    total width D. The head counts, tied or not, an embedding lookup does not, and of experts only a token's own count.
    Attention counts the full square by convention, although causal kernels skip half of it. Source: PaLM (Chowdhery et
    al. 2022), appendix B.
    """
    shapes = parameter_shapes(model, vocabulary)
    multiplied = (
        sum(
            math.prod(shape) * (model.routing.top_k if ".mlp.experts." in name else model.experts)
            for name, shape in shapes.items()
            if len(shape) == 2 and name != "model.embed_tokens.weight"
        )
        // model.experts
    )
    if model.tie_embeddings and model.head == "tokens":
        multiplied += vocabulary * model.hidden
    length = context or model.context
    seen = sum(min(layer.window or length, length) for layer in model.layer_shapes())  # by a token, over all layers
    return 6 * multiplied + 6 * seen * model.heads * (model.head_width + model.value_width)


def _stream(name: str, seed: int, block: int) -> np.random.Generator:
    key = blake3(f"initialise\0{seed}\0{name}\0{block}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
