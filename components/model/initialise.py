"""The first weights of a model, and what can be counted without any.

Promises that a tensor is a pure function of (seed, canonical name, shape, spec): no rank, layout, thread count, device
or order of calls changes a bit, and any flat range can be made without the rest. Leaves loading other weights to
`hugging_face`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from holdfast.components.model.decoder import Decoder
from holdfast.components.spec.model import Model

BLOCK = 1 << 20  # elements that one random stream makes; part of what the weights are


def initial_slice(name: str, shape: Sequence[int], model: Model, seed: int, *, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the flattened initial tensor `name`, fp32 on the CPU.

    Norms are 1. Matrices are normal with `init_std`, and those that write to the residual stream (o_proj, down_proj)
    are scaled by 1/sqrt(2 * layers), as in GPT-2, so that its variance does not grow with depth.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"{name}: [{start}, {stop}) is not a range within its {size} elements")
    if len(shape) == 1:
        return torch.ones(stop - start)
    deviation = model.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= math.sqrt(2 * model.layers)
    values = np.empty(stop - start, dtype=np.float32)
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first, last = block * BLOCK, min((block + 1) * BLOCK, size)
        from_, upto = max(start, first), min(stop, last)
        if (from_, upto) == (first, last):
            _stream(name, seed, block).standard_normal(out=values[first - start : last - start], dtype=np.float32)
        else:
            whole = _stream(name, seed, block).standard_normal(last - first, dtype=np.float32)
            values[from_ - start : upto - start] = whole[from_ - first : upto - first]
    values *= np.float32(deviation)
    return torch.from_numpy(values)


def initial_tensor(name: str, shape: Sequence[int], model: Model, seed: int) -> Tensor:
    """The initial tensor of a canonical name: fp32, on the CPU."""
    return initial_slice(name, shape, model, seed, start=0, stop=math.prod(shape)).reshape(tuple(shape))


def initialise(decoder: Decoder, seed: int) -> None:
    """Fill a decoder, on any device, with its initial weights."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initial_tensor(name, parameter.shape, decoder.shape, seed))


def parameter_shapes(model: Model, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Canonical names and global shapes, in the canonical order. Allocates nothing."""
    with torch.device("meta"):
        decoder = Decoder(model, vocabulary)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def parameter_count(model: Model, vocabulary: int) -> int:
    """Trained parameters, the embedding included; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(model, vocabulary).values())


def flops_per_token(model: Model, vocabulary: int, context: int | None = None) -> int:
    """Floating-point operations that forward and backward spend on one token of a sequence of `context` tokens.

    6 N + 12 L D T: six for every parameter that is multiplied (the head counts, tied or not; looking up an embedding
    does not), and the attention scores and sums of L layers of width D, counted over the full square as is the custom,
    though causal kernels skip half of it. Source: PaLM (Chowdhery et al. 2022), appendix B.
    """
    shapes = parameter_shapes(model, vocabulary)
    multiplied = sum(
        math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "model.embed_tokens.weight"
    )
    if model.tie_embeddings:
        multiplied += vocabulary * model.hidden
    return 6 * multiplied + 12 * model.layers * model.hidden * (context or model.context)


def _stream(name: str, seed: int, block: int) -> np.random.Generator:
    key = blake3(f"initialise\0{seed}\0{name}\0{block}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(key, "little")))
