"""Low-rank adapters (LoRA; Hu et al. 2021): the product of two small matrices is added to a frozen matrix.

The forward arithmetic is that of `peft`, so adapters mean the same there. Merged weights have the same bytes on every
machine. `peft_files` defines the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.model import nf4
from holdfast.model.decoder import SCORE, Decoder
from holdfast.model.export import Rows
from holdfast.model.layers import Linear
from holdfast.spec.model import Model
from holdfast.spec.training import Lora

A, B = ".lora_A.weight", ".lora_B.weight"  # name suffixes of an adapter's matrices: [rank, in], [out, rank]
MERGED_ELEMENTS = 1 << 18  # computed together, so that they stay in a core's cache


class FrozenLinear(Linear):
    """A linear layer whose weights are not trained, and are stored as `Lora.base` says.

    Stored in less than the arithmetic's width, the matrix exists at full width only while it is multiplied: it is
    expanded again for the backward pass. Biases stay fp32.
    """

    packed: Tensor  # of NF4, as in `nf4`
    block_scale: Tensor

    def __init__(self, base: Linear, stored: str) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.bias, self.stored = base.bias, stored
        if stored == "nf4":
            rows, columns = base.out_features, base.in_features
            self.register_parameter("weight", None)
            self.register_buffer("packed", torch.empty(rows, columns // 2, dtype=torch.uint8), persistent=False)
            self.register_buffer("block_scale", torch.empty(rows, columns // nf4.BLOCK), persistent=False)
        else:
            narrow = stored == "bf16"
            self.weight = nn.Parameter(base.weight.bfloat16(), requires_grad=False) if narrow else base.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.stored == "fp32":
            return super().forward(x)
        kind = x.device.type
        wide = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        stored = (self.packed, self.block_scale) if self.stored == "nf4" else (self.weight,)
        result: Tensor = _FrozenProduct.apply(x.to(wide), *stored)
        return result if self.bias is None else result + self.bias.to(wide)


class _FrozenProduct(torch.autograd.Function):
    """x W transposed, with a matrix that is saved for the backward pass as it is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        return functional.linear(x, _expand(stored, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors
        return gradient @ _expand(stored, gradient.dtype), *(None for _ in stored)


def _expand(stored: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    return stored[0].to(dtype) if len(stored) == 1 else nf4.dequantise(stored[0], stored[1], dtype)


class AdaptedLinear(FrozenLinear):
    """A frozen linear layer with its adapter: W x + B A x * scale. It has the parameters of the layer that it
    replaces."""

    def __init__(self, base: Linear, lora: Lora) -> None:
        super().__init__(base, lora.base)
        assert lora.rank is not None
        self.lora_A = Linear(base.in_features, lora.rank, bias=False)
        self.lora_B = Linear(lora.rank, base.out_features, bias=False)
        self.scale = scale_of(lora)
        self.adapted = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        result = super().forward(x)
        return result + self.lora_B(self.lora_A(x)) * self.scale if self.adapted else result


def scale_of(lora: Lora) -> float:
    """The factor of the product of an adapter's matrices."""
    assert lora.rank is not None
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def add_adapters(decoder: Decoder, lora: Lora) -> None:
    """Give each layer in `lora.targets` an adapter with unfilled weights, and freeze everything else but a scalar head.
    The matrices of all layers are stored as `lora.base` says. Does nothing without a rank."""
    if lora.rank is None:
        return
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name == SCORE)
    for block in decoder.model.layers:
        for part in () if block is None else list(block.children()):  # a pipeline stage has only some layers
            for name, base in list(part.named_children()):
                if isinstance(base, Linear):
                    adapted = name in lora.targets
                    setattr(part, name, AdaptedLinear(base, lora) if adapted else FrozenLinear(base, lora.base))


@contextmanager
def without_adapters(decoder: nn.Module) -> Iterator[None]:
    """Inside the context, the decoder computes with its frozen weights only."""
    adapted = [module for module in decoder.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.adapted = False
    try:
        yield
    finally:
        for module in adapted:
            module.adapted = True


def is_adapter(name: str) -> bool:
    """Whether a canonical name is that of an adapter's matrix, or of its optimizer state."""
    return name.endswith((A, B))


def adapter_shapes(model: Model, vocabulary: int, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Canonical names and global shapes of all adapters, in canonical order. Allocates nothing."""
    with torch.device("meta"):
        decoder = Decoder(model, vocabulary)
        add_adapters(decoder, lora)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters() if is_adapter(name)}


def frozen_matrices(model: Model, vocabulary: int, lora: Lora) -> set[str]:
    """Canonical names of the matrices that are stored as `lora.base` says. Allocates nothing."""
    with torch.device("meta"):
        decoder = Decoder(model, vocabulary)
        add_adapters(decoder, lora)
    return {f"{name}.weight" for name, module in decoder.named_modules() if isinstance(module, FrozenLinear)}


def stored_rows(base: Rows, matrices: Collection[str], stored: str) -> Rows:
    """The rows of a base, fp32, with the values that `matrices` have as they are stored in training."""

    def rows(name: str) -> Iterator[Tensor]:
        for part in base(name):
            if name not in matrices or stored == "fp32":
                yield part
            else:
                yield part.bfloat16().float() if stored == "bf16" else nf4.dequantise(*nf4.quantise(part))

    return rows


def merging_rows(base: Rows, adapters: Collection[str], adapter: Callable[[str], Tensor], lora: Lora) -> Rows:
    """The rows of a model (see `export`), fp32, with W + B A * scale instead of W if `adapters` has the name of A.
    `base` returns the rows of W, and `adapter` whole adapter matrices.

    Products of fp32 numbers are exact in fp64, and they are added one after another. So no library, thread count or
    machine changes a bit.
    """

    def rows(name: str) -> Iterator[Tensor]:
        stem = name.removesuffix(".weight")
        return _merged(base(name), adapter(stem + A), adapter(stem + B)) if stem + A in adapters else base(name)

    def _merged(parts: Iterator[Tensor], low: Tensor, high: Tensor) -> Iterator[Tensor]:
        low, high, first = low.double(), high.double(), 0
        count = max(1, MERGED_ELEMENTS // low.shape[1])
        for part in parts:
            for some in part.split(count):
                product = torch.zeros(some.shape, dtype=torch.float64)
                for index, direction in enumerate(low):
                    product.addcmul_(high[first : first + len(some), index, None], direction)
                first += len(some)
                yield (some.double() + product * scale_of(lora)).float()

    return rows
