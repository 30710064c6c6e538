"""The shared memory that a rank copies its state into, and the positions of boxes in it.

The agent receives it as an anonymous file descriptor. The memory is freed when the last process that holds it ends,
even if that process was killed. It is sealed, so neither process can shrink it under the other.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch

from holdfast.checkpoint.agent.protocol import BUFFERS, Slot
from holdfast.checkpoint.box import DTYPES, TensorBox
from holdfast.checkpoint.fingerprint import StateDigest, begun_digest
from holdfast.spec.errors import HungError, NoSpaceError

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


# Copying the state while training continues: two buffers in host memory, filled in the background.
#
# The state does not change between two optimizer steps, so the copy has the time of a forward and a backward pass. A
# thread copies on a CPU, a separate stream on an accelerator. Code that changes the state first waits for the copy
# (`Copy.wait`). On an accelerator this is a wait of its stream and not of the host.

COPY_SECONDS = 600.0  # limit for one copy, after which the thread that makes it counts as hung
_POLL_SECONDS = 0.001  # interval between two queries of the device


class Copy:
    """A copy in progress."""

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        self._boxes = list(boxes)
        self.device = next((box.data.device for box in boxes if box.data.is_cuda), None)
        self._issued = threading.Event()  # all reads of the state are done, or queued in a stream
        self._read: Any = None  # the event after which a device has read it
        self._begun = None if self.device is None else torch.cuda.current_stream(self.device).record_event()
        self.digest: StateDigest | None = None  # digest of the state, where the device computes it

    def wait(self) -> None:
        """Let no later operation change the state before it is copied. Raises HungError when the copy is not made
        within COPY_SECONDS."""
        if not self._issued.wait(COPY_SECONDS):
            raise HungError(f"the copy of {len(self._boxes)} boxes of the state was not made in {COPY_SECONDS:g} s")
        if self._read is not None:
            torch.cuda.current_stream(self.device).wait_event(self._read)

    def fill(self, targets: Sequence[TensorBox], stream: Any) -> None:
        """Copy into `targets`; they are whole when this returns."""
        if self.device is None:
            for box, target in zip(self._boxes, targets, strict=True):
                target.data.copy_(box.data.detach())
            self.end()
            return
        with torch.cuda.stream(stream):
            stream.wait_event(self._begun)
            for box, target in zip(self._boxes, targets, strict=True):
                target.data.copy_(box.data.detach(), non_blocking=True)
                if box.data.is_cuda:
                    box.data.record_stream(stream)  # it may be a temporary that an engine has gathered
            digest = begun_digest(self._boxes)
            self._read = stream.record_event()
        self.end()  # from here on only this thread waits for the device, and it leaves the core to other threads
        while not self._read.query():
            time.sleep(_POLL_SECONDS)
        self.digest = digest()

    def end(self) -> None:
        """Release the state: this copy reads it no more."""
        self._boxes = []
        self._issued.set()


class Staging:
    """The buffers of a rank, each as large as the largest state it held. The second is allocated when it is needed."""

    def __init__(self, allocate: Callable[[int, int], torch.Tensor]) -> None:
        """`allocate(buffer, bytes)` gives the memory of a buffer. It raises NoSpaceError."""
        self._allocate = allocate
        self._memory: dict[int, torch.Tensor] = {}
        self._stream: Any = None

    def fill(self, buffer: int, copy: Copy, boxes: Sequence[TensorBox]) -> tuple[Slot, ...]:
        """Copy into a buffer that has no reader. Return the positions of the boxes in it. Raises NoSpaceError."""
        slots, size = laid_out(boxes)
        with nullcontext() if copy.device is None else torch.cuda.device(copy.device):
            if buffer not in self._memory or self._memory[buffer].numel() < size:
                self._memory.pop(buffer, None)
                memory = self._allocate(buffer, size)
                if copy.device is not None:
                    _pin(memory)
                self._memory[buffer] = memory
            if copy.device is not None and self._stream is None:
                self._stream = torch.cuda.Stream()
            copy.fill(boxes_in(self._memory[buffer], slots), self._stream)
        return slots


def free_buffers() -> set[int]:
    """The numbers of all buffers, which are free at first."""
    return set(range(BUFFERS))


def _pin(memory: torch.Tensor) -> None:
    """Lock the pages of a buffer, so that a device copies into them directly. The pages are touched before: CUDA's call
    holds Python's lock, on an H200 for 0.35 s per GiB if it has to find them, and for 0.06 s if they exist."""
    memory.view(-1)[:: mmap.PAGESIZE].zero_()
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise NoSpaceError(f"{memory.numel()} bytes of a checkpoint's copy cannot be pinned (CUDA error {int(code)})")
