"""Copying the state while training goes on: two buffers in host memory, filled behind the trainer's back.

The state does not change between two optimizer steps, so the copy has the time of a forward and a backward pass: a
thread copies on a CPU, a stream of its own on an accelerator, out of its way. Whoever changes the state waits for the
copy first (`Copy.wait`), which on an accelerator is a wait of its stream and not of the host.
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

COPY_SECONDS = 600.0  # for one copy, after which the thread that makes it counts as hung
_POLL_SECONDS = 0.001  # between two looks at the device


class Copy:
    """A copy on its way."""

    def __init__(self, boxes: Sequence[TensorBox]) -> None:
        self._boxes = list(boxes)
        self.device = next((box.data.device for box in boxes if box.data.is_cuda), None)
        self._issued = threading.Event()  # whatever reads the state is done, or waits in a stream
        self._read: Any = None  # the event after which a device has read it
        self._begun = None if self.device is None else torch.cuda.current_stream(self.device).record_event()
        self.digest: StateDigest | None = None  # of the state, where the device computes it

    def wait(self) -> None:
        """Let nothing after this change the state before it is copied. Raises HungError when nobody has copied it for
        COPY_SECONDS."""
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
        self.end()  # nobody waits for the device from here on but this thread, which leaves the core to others
        while not self._read.query():
            time.sleep(_POLL_SECONDS)
        self.digest = digest()

    def end(self) -> None:
        """Nothing reads the state any more."""
        self._boxes = []
        self._issued.set()


class Staging:
    """The buffers of a rank: each as large as the state it has held, and the second there once it is needed."""

    def __init__(self, allocate: Callable[[int, int], torch.Tensor]) -> None:
        """`allocate(buffer, bytes)` gives the memory of a buffer. It raises NoSpaceError."""
        self._allocate = allocate
        self._memory: dict[int, torch.Tensor] = {}
        self._stream: Any = None

    def fill(self, buffer: int, copy: Copy, boxes: Sequence[TensorBox]) -> tuple[Slot, ...]:
        """Copy into a buffer that nobody reads; where the boxes lie there. Raises NoSpaceError."""
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
    """All buffers, before anything is in them."""
    return set(range(BUFFERS))


def _pin(memory: torch.Tensor) -> None:
    """Lock the pages of a buffer, so that a device copies into them by itself."""
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(code) != 0:
        raise NoSpaceError(f"{memory.numel()} bytes of a checkpoint's copy cannot be pinned (CUDA error {int(code)})")
