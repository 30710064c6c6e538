"""Low-rank adapters (LoRA; Hu et al. 2021): the product of two small matrices is added to a frozen matrix.

The forward arithmetic is that of `peft`, so adapters mean the same there. Merged weights have the same bytes on every
machine. `peft_files` defines the files.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.model import nf4
from holdfast.model.decoder import SCORE, Decoder
from holdfast.model.experts import Experts, Matrices, Matrix
from holdfast.model.export import Rows
from holdfast.model.layers import Linear
from holdfast.spec.model import Model
from holdfast.spec.training import Lora

A, B = ".lora_A.weight", ".lora_B.weight"  # name suffixes of an adapter's matrices: [rank, in], [out, rank]
EXPERT_MATRICES = {"gate_up": "gate_proj", "down": "down_proj"}  # of each expert, and the target of their adapter
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
        self.product = frozen_product
        if stored == "nf4":
            rows, columns = base.out_features, base.in_features
            self.register_parameter("weight", None)
            self.register_buffer("packed", torch.empty(rows, columns // 2, dtype=torch.uint8), persistent=False)
            self.register_buffer("block_scale", torch.empty(rows, columns // nf4.BLOCK), persistent=False)
        else:
            narrow = stored == "bf16"
            self.weight = nn.Parameter(base.weight.bfloat16(), requires_grad=False) if narrow else base.weight

    def packed_matrices(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The matrix that is stored in NF4: its name within the layer, its codes and its scales."""
        if self.stored == "nf4":
            yield "weight", self.packed, self.block_scale

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        if self.stored == "fp32":
            return super().forward(x)
        kind = x.device.type
        wide = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        stored = (self.packed, self.block_scale) if self.stored == "nf4" else (self.weight,)
        result = self.product(x.to(wide), *stored)
        return result if self.bias is None else result + self.bias.to(wide)


def frozen_product(x: Tensor, *stored: Tensor) -> Tensor:
    """x W transposed, with a matrix that is kept for the backward pass as it is stored."""
    result: Tensor = _FrozenProduct.apply(x, *stored)
    return result


class _FrozenProduct(torch.autograd.Function):
    """x W transposed, with a matrix that is saved for the backward pass as it is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        return functional.linear(x, nf4.expand(stored, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        stored = ctx.saved_tensors
        return gradient @ nf4.expand(stored, gradient.dtype), *(None for _ in stored)


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


class StackedAdapter(nn.Module):
    """The adapters of one matrix of each expert: [experts * rank, in] and [experts * out, rank]."""

    def __init__(self, matrix: Tensor, experts: int, rank: int) -> None:
        super().__init__()
        rows, columns = matrix.shape
        self.lora_A = Linear(columns, experts * rank, bias=False)
        self.lora_B = Linear(rank, rows, bias=False)


class FrozenExperts(Experts):
    """Experts whose weights are not trained, with adapters of the matrices in `lora.targets`. Gate and up are one
    matrix, with one adapter. Biases stay fp32."""

    gate_up_packed: Tensor  # of NF4, as in `nf4`
    gate_up_scale: Tensor
    down_packed: Tensor
    down_scale: Tensor

    def __init__(self, base: Experts, shape: Model, lora: Lora) -> None:
        with torch.device("meta"):
            super().__init__(shape)
        assert lora.rank is not None
        self.stored, self.scale, self.adapted = lora.base, scale_of(lora), True
        self.gate_up_proj_bias, self.down_proj_bias = base.gate_up_proj_bias, base.down_proj_bias
        self.gate_up, self.down = None, None
        for name, target in EXPERT_MATRICES.items():
            matrix: Tensor = getattr(base, f"{name}_proj")
            if target in lora.targets:
                setattr(self, name, StackedAdapter(matrix, self.experts, lora.rank))
            if lora.base == "nf4":
                rows, columns = matrix.shape
                packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=matrix.device)
                scale = torch.empty(rows, columns // nf4.BLOCK, device=matrix.device)
                self.register_parameter(f"{name}_proj", None)
                self.register_buffer(f"{name}_packed", packed, persistent=False)
                self.register_buffer(f"{name}_scale", scale, persistent=False)
            else:
                kept = matrix.bfloat16() if lora.base == "bf16" else matrix
                setattr(self, f"{name}_proj", nn.Parameter(kept, requires_grad=False))

    def packed_matrices(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The matrices that are stored in NF4: the name within the layer, codes and scales of each."""
        if self.stored == "nf4":
            yield "gate_up_proj", self.gate_up_packed, self.gate_up_scale
            yield "down_proj", self.down_packed, self.down_scale

    def matrices(self) -> Matrices:
        """See Experts."""
        gate_up = self._matrix("gate_up", self.gate_up_proj_bias)
        return Matrices(gate_up, self._matrix("down", self.down_proj_bias), self.clamped)

    def _matrix(self, name: str, bias: Tensor | None) -> Matrix:
        kept = ("packed", "scale") if self.stored == "nf4" else ("proj",)
        low_rank: StackedAdapter | None = getattr(self, name) if self.adapted else None
        adapter = () if low_rank is None else (low_rank.lora_A.weight, low_rank.lora_B.weight)
        return Matrix(tuple(getattr(self, f"{name}_{each}") for each in kept), bias, adapter, self.scale)


def scale_of(lora: Lora) -> float:
    """The factor of the product of an adapter's matrices."""
    assert lora.rank is not None
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def add_adapters(decoder: Decoder, lora: Lora) -> None:
    """Give each matrix in `lora.targets` an adapter with unfilled weights, and freeze all else but a scalar head. The
    matrices of all layers are stored as `lora.base` says. Does nothing without a rank."""
    if lora.rank is None:
        return
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name == SCORE)
    for block in decoder.model.layers:
        for part in () if block is None else list(block.modules()):  # a pipeline stage has only some layers
            for name, base in list(part.named_children()):
                if isinstance(base, Experts):
                    setattr(part, name, FrozenExperts(base, decoder.shape, lora))
                elif isinstance(base, Linear) and name != "shared_expert_gate":
                    adapted = name in lora.targets
                    setattr(part, name, AdaptedLinear(base, lora) if adapted else FrozenLinear(base, lora.base))


@contextmanager
def without_adapters(decoder: nn.Module) -> Iterator[None]:
    """Inside the context, the decoder computes with its frozen weights only."""
    adapted = [module for module in decoder.modules() if isinstance(module, AdaptedLinear | FrozenExperts)]
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
    names = {f"{name}.weight" for name, module in decoder.named_modules() if isinstance(module, FrozenLinear)}
    layers = [name for name, module in decoder.named_modules() if isinstance(module, FrozenExperts)]
    return names | {f"{name}.{matrix}_proj" for name in layers for matrix in EXPERT_MATRICES}


def stored_rows(base: Rows, matrices: Collection[str], stored: str) -> Rows:
    """The rows of a base, fp32, with the values that `matrices` have as they are stored in training."""

    def rows(name: str, *bounds: int) -> Iterator[Tensor]:
        for part in base(name, *bounds):
            if name not in matrices or stored == "fp32":
                yield part
            else:
                yield part.bfloat16().float() if stored == "bf16" else nf4.dequantise(*nf4.quantise(part))

    return rows


def merging_rows(base: Rows, adapters: Mapping[str, tuple[int, ...]], trained: Rows, lora: Lora) -> Rows:
    """The rows of a model (see `export`), fp32, with W + B A * scale instead of W if `adapters` has the name of A.
    `base` returns the rows of W, and `trained` those of adapters, whose shapes are `adapters`.

    Products of fp32 numbers are exact in fp64, and they are added one after another. So no library, thread count or
    machine changes a bit.
    """
    rank = lora.rank
    assert rank is not None

    def rows(name: str, *bounds: int) -> Iterator[Tensor]:
        stem = name.removesuffix(".weight") if name.endswith(".weight") else name.removesuffix("_proj")  # of experts
        if stem + A not in adapters:
            yield from base(name, *bounds)
            return
        height = adapters[stem + B][0] // (adapters[stem + A][0] // rank)  # rows of an expert
        position, expert = bounds[0] if bounds else 0, -1
        for part in base(name, *bounds):
            for some in _within(part, position, height):
                if position // height != expert:
                    expert = position // height
                    low, high = (
                        torch.cat(list(trained(stem + end, expert * count, (expert + 1) * count))).double()
                        for end, count in ((A, rank), (B, height))
                    )
                yield _merged(some, low, high[position % height :], scale_of(lora))
                position += len(some)

    return rows


def _within(part: Tensor, position: int, height: int) -> Iterator[Tensor]:
    """Rows that begin at `position`, in parts that are each of one expert and fit into a core's cache."""
    count = max(1, MERGED_ELEMENTS // part.shape[1])
    while len(part):
        taken = min(count, height - position % height)
        some, part = part[:taken], part[taken:]
        position += len(some)
        yield some


def _merged(some: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    product = torch.zeros(some.shape, dtype=torch.float64)
    for index, direction in enumerate(low):
        product.addcmul_(high[: len(some), index, None], direction)
    return (some.double() + product * scale).float()
