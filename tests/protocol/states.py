"""The state of a simulated training: a function of the step, cut in different ways for any number of ranks."""

from functools import lru_cache

import torch

from holdfast.checkpoint import TensorBox

Tensors = dict[str, torch.Tensor]


@lru_cache(maxsize=64)
def state(step: int) -> Tensors:
    """Tensors of several kinds after `step`: some change at every step, one sometimes, one never."""
    generator = torch.Generator().manual_seed(step)
    slow = torch.Generator().manual_seed(1000 + step // 3)
    return {
        "count": torch.tensor(step, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "frozen": torch.arange(10, dtype=torch.float32),
        "half": torch.randn(4, 6, generator=generator).bfloat16(),
        "matrix": torch.randn(6, 4, generator=generator),
        "slow": torch.randn(5, 2, generator=slow),
    }


def cut(tensors: Tensors, rank: int, size: int, columns: bool) -> list[TensorBox]:
    """The part of `rank` of `size`: rows of every tensor, or columns where there are some. The last rank has scalars
    and empty tensors.
    """
    boxes = []
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or not tensor.numel():
            boxes += [TensorBox.whole(name, tensor)] if rank == size - 1 else []
            continue
        axis = 1 if columns and tensor.dim() > 1 else 0
        width = -(-tensor.shape[axis] // size)
        low = min(rank * width, tensor.shape[axis])
        part = tensor.narrow(axis, low, min(width, tensor.shape[axis] - low))
        if part.numel():
            offset = tuple(low if dimension == axis else 0 for dimension in range(tensor.dim()))
            boxes.append(TensorBox(name, tuple(tensor.shape), offset, part))
    return boxes


def whole(tensors: Tensors) -> list[TensorBox]:
    """Every tensor as one box."""
    return [TensorBox.whole(name, tensor) for name, tensor in tensors.items()]


def blank(boxes: list[TensorBox]) -> list[TensorBox]:
    """The same boxes with zeroed content."""
    return [TensorBox(box.name, box.global_shape, box.offset, torch.full_like(box.data, 77)) for box in boxes]


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def same(boxes: list[TensorBox], others: list[TensorBox]) -> bool:
    """Whether two lists of boxes hold the same bits."""
    return [(box.name, box.offset, bits(box.data)) for box in boxes] == [
        (box.name, box.offset, bits(box.data)) for box in others
    ]
