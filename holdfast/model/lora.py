"""Low-rank adapters (LoRA; Hu et al. 2021): the product of two small matrices is added to a frozen matrix.

The forward arithmetic is that of `peft`, so adapters mean the same there. Merged weights have the same bytes on every
machine. `peft_files` defines the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from holdfast.model.decoder import Decoder, Linear
from holdfast.model.export import Rows
from holdfast.spec.model import Model
from holdfast.spec.training import Lora

A, B = ".lora_A.weight", ".lora_B.weight"  # name suffixes of an adapter's matrices: [rank, in], [out, rank]
MERGED_ELEMENTS = 1 << 18  # computed together, so that they stay in a core's cache


class AdaptedLinear(Linear):
    """A frozen linear layer with its adapter: W x + B A x * scale. It has the parameters of the layer that it
    replaces."""

    def __init__(self, base: Linear, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = Linear(base.in_features, rank, bias=False)
        self.lora_B = Linear(rank, base.out_features, bias=False)
        self.scale = scale
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
    """Give each layer in `lora.targets` an adapter with unfilled weights, and freeze everything else. Does nothing
    without a rank."""
    if lora.rank is None:
        return
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    for block in decoder.model.layers:
        for part in () if block is None else list(block.children()):  # a pipeline stage has only some layers
            for name, base in list(part.named_children()):
                if name in lora.targets and isinstance(base, Linear):
                    setattr(part, name, AdaptedLinear(base, lora.rank, scale_of(lora)))


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
