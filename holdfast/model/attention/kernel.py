"""What the two kernels of attention have in common: the interface, its values, and the deterministic mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.model.attention.segments import Segments


@dataclass(frozen=True)
class AttentionPattern:
    """What is the same for all heads: the segments, the window, and the factor of the scores."""

    segments: Segments
    window: int | None
    scale: float


class BackwardInputs(NamedTuple):
    """What a backward needs: the gradient of the output, and what the forward got and returned."""

    gradient: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    pattern: AttentionPattern


class Kernel(Protocol):
    """One way to compute attention without sinks: the modules `tiles` and `flash`. All widths are equal."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern) -> tuple[Tensor, Tensor]:
        """The output [B, H, T, K], and lse [B, H, T] in fp32 (fp64 for fp64)."""

    def backward(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""


@contextmanager
def deterministic_backward() -> Iterator[None]:
    """Kernels of CUDA have a deterministic backward, and choose it by this global switch of torch alone. It is on where
    a run promises bits (see `make_deterministic`). If it only warns, it is made strict here."""
    if not promises_bits() or not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    previous = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = previous  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)


def promises_bits() -> bool:
    """Whether the same inputs must give the same bits. Else a kernel may take its fastest backward."""
    return torch.are_deterministic_algorithms_enabled()
