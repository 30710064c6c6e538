"""The seam between the training loop and what computes a step.

An engine owns the model, the optimizer and the layout. The loop owns time: which batch, which learning rate, when to
save. State crosses the seam as boxes with canonical names, so any engine can go on where another stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.components.checkpoint import TensorBox
from holdfast.components.train.assignment import Assignment

Fill = Callable[[Sequence[TensorBox]], int]


@dataclass(frozen=True)
class StepOutput:
    """What one optimizer step measured. Tensors stay on the device, so that reading them is the loop's decision."""

    loss: torch.Tensor  # mean over the global batch, nats a token
    grad_norm: torch.Tensor  # before clipping


class Engine(Protocol):
    """A model and its optimizer, laid out over the ranks. All methods are collective."""

    @property
    def layout(self) -> dict[str, Any]:
        """How the state is laid out, for the manifest."""

    def step(self, rows: torch.Tensor, learning_rate: float) -> StepOutput:
        """One optimizer step on this rank's rows of the global batch: [rows, context + 1] token ids on the CPU."""

    def load(self, fill: Fill) -> None:
        """Take over a state: `fill` is given every box that this rank needs, fills them, and returns their step."""

    def saved(self) -> Sequence[TensorBox]:
        """The boxes that this rank saves: those of all ranks together make up every tensor exactly once. They are
        views of the living state where possible: copy them before the next step."""


def build_engine(spec: Assignment, vocabulary: int, end_of_text: int) -> Engine:
    """The engine that `parallel.strategy` names. Its state is undefined until `load`."""
    if spec.parallel.engine == "deepspeed":
        from holdfast.components.train.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, vocabulary, end_of_text)
    from holdfast.components.train.torch_engine import TorchEngine

    return TorchEngine(spec, vocabulary, end_of_text)
