"""The shared memory that a rank copies its state into, and the positions of boxes in it.

The agent receives it as an anonymous file descriptor. The memory is freed when the last process that holds it ends,
even if that process was killed. It is sealed, so neither process can shrink it under the other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from math import prod

import torch

from holdfast.checkpoint.agent.protocol import Slot
from holdfast.checkpoint.box import DTYPES, TensorBox
from holdfast.spec.errors import NoSpaceError

_ALIGNMENT = 512  # bytes


class SharedMemory:
    """Bytes that two processes see."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Takes over the descriptor. Raises ValueError for one that is shorter than `size`, or could become so."""
        self.descriptor, self.size = descriptor, size
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if os.fstat(descriptor).st_size < size or not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"a buffer of {size} bytes is shorter than it says, or not sealed")
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Allocate `size` bytes, all pages included. Raises NoSpaceError."""
        descriptor = -1
        try:
            descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(descriptor, size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise NoSpaceError(f"{size} bytes of shared memory for a checkpoint's copy: {error}") from error

    def close(self) -> None:
        """Close the descriptor. The memory is freed when no process maps it."""
        os.close(self.descriptor)


def laid_out(boxes: Sequence[TensorBox]) -> tuple[tuple[Slot, ...], int]:
    """The position of each box in a buffer, and the size of the buffer in bytes."""
    slots, end = [], 0
    for box in boxes:
        shape = tuple(box.data.shape)
        slots.append(
            Slot(
                name=box.name,
                dtype=box.dtype_name,
                global_shape=box.global_shape,
                offset=box.offset,
                shape=shape,
                start=end,
            )
        )
        end += -(-prod(shape) * box.data.element_size() // _ALIGNMENT) * _ALIGNMENT
    return tuple(slots), max(end, _ALIGNMENT)


def boxes_in(memory: torch.Tensor, slots: Sequence[Slot]) -> list[TensorBox]:
    """The boxes that lie in a buffer, as views of it. Raises ValueError for one that lies outside."""
    boxes = []
    for slot in slots:
        dtype = DTYPES.get(slot.dtype)
        if dtype is None or min((*slot.shape, *slot.offset, 0)) < 0 or slot.start % _ALIGNMENT:
            raise ValueError(f"{slot.name}: no box lies so: {slot!r}")
        size = prod(slot.shape) * dtype.itemsize
        if slot.start + size > memory.numel():
            raise ValueError(f"{slot.name}: its box ends beyond a buffer of {memory.numel()} bytes")
        data = memory[slot.start : slot.start + size].view(dtype).view(slot.shape)
        boxes.append(TensorBox(slot.name, slot.global_shape, slot.offset, data))
    return boxes
