"""The seam between the training loop and what computes a step.

An engine owns the model, the optimizer and the layout. The loop owns time: which batch, which learning rate, when to
save. State crosses the seam as boxes with canonical names, so any engine can go on where another stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.components.checkpoint import TensorBox
from holdfast.components.train.assignment import Assignment


@dataclass(frozen=True)
class StepOutput:
    """What one optimizer step measured. Tensors stay on the device, so that reading them is the loop's decision."""

    loss: torch.Tensor  # mean over the counted tokens of the global batch, nats
    grad_norm: torch.Tensor  # before clipping


class Engine(Protocol):
    """A model and its optimizer, laid out over the ranks. All methods are collective."""

    @property
    def layout(self) -> dict[str, Any]:
        """How the state is laid out, for the manifest."""

    def step(self, rows: torch.Tensor, learning_rate: float) -> StepOutput:
        """One optimizer step on this rank's rows of the global batch: [rows, context + 1] token ids on the CPU."""

    def boxes(self) -> Sequence[TensorBox]:
        """Every box of the state that this rank needs, to be filled in place; `restored` comes after."""

    def restored(self, step: int) -> None:
        """Take over the state after `step` steps, which the boxes hold now."""

    def saved(self) -> Sequence[TensorBox]:
        """The boxes that this rank saves: those of all ranks together make up every tensor exactly once. They are
        views of the living state where possible: copy them before the next step."""

    def replicas(self) -> Sequence[TensorBox]:
        """What other ranks hold as well and compute alike: all ranks that name the same boxes must hold the same bits.
        Empty where every rank holds a part of its own."""


def build_engine(spec: Assignment, vocabulary: int, end_of_text: int) -> Engine:
    """The engine that `parallel.strategy` names. Its state is undefined until `restored`."""
    if spec.parallel.engine == "deepspeed":
        from holdfast.components.train.engines.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, vocabulary, end_of_text)
    from holdfast.components.train.engines.torch.engine import TorchEngine

    return TorchEngine(spec, vocabulary, end_of_text)
