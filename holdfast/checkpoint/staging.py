"""Copying the state while training continues: two buffers in host memory, filled in the background.

The state does not change between two optimizer steps, so the copy has the time of a forward and a backward pass. A
thread copies on a CPU, a separate stream on an accelerator. Code that changes the state first waits for the copy
(`Copy.wait`). On an accelerator this is a wait of its stream and not of the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from holdfast.checkpoint.agent.buffers import boxes_in, laid_out
from holdfast.checkpoint.agent.protocol import BUFFERS, Slot
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.fingerprint import StateDigest, begun_digest
from holdfast.spec.errors import HungError, NoSpaceError

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
                self._memory[buffer] = memory = self._allocate(buffer, size)
                if copy.device is not None:
                    _pin(memory)
            if copy.device is not None and self._stream is None:
                self._stream = torch.cuda.Stream()
            copy.fill(boxes_in(self._memory[buffer], slots), self._stream)
        return slots


def free_buffers() -> set[int]:
    """The numbers of all buffers, which are free at first."""
    return set(range(BUFFERS))


def _pin(memory: torch.Tensor) -> None:
    """Lock the pages of a buffer, so that a device copies into them directly."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise NoSpaceError(f"{memory.numel()} bytes of a checkpoint's copy cannot be pinned (CUDA error {int(code)})")
