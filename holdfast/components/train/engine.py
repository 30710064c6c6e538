"""The seam between the training loop and what computes a step.

An engine owns the model, the optimizer and the layout. The loop owns time: which batch, which learning rate, when to
save. State crosses the seam as boxes with canonical names, so any engine can go on where another stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

from holdfast.checkpoint import TensorBox
from holdfast.components.train.anomalies import Judge, Scalars
from holdfast.components.train.assignment import Assignment


@dataclass(frozen=True)
class StepOutput:
    """What one optimizer step measured. Tensors stay on the device, so that reading them is the loop's decision."""

    loss: torch.Tensor  # mean over the counted tokens of the global batch, nats
    grad_norm: torch.Tensor  # before clipping
    held: torch.Tensor | None = None  # 1.0 where the update was held back; None: it never is


class Engine(Protocol):
    """A model and its optimizer, laid out over the ranks. All methods are collective."""

    @property
    def layout(self) -> dict[str, Any]:
        """How the state is laid out, for the manifest."""

    def step(
        self,
        rows: torch.Tensor,
        learning_rate: float,
        before_update: Callable[[], None] = lambda: None,
        judge: Judge | None = None,
        size: int | None = None,
    ) -> StepOutput:
        """One optimizer step on this rank's rows of the global batch: [rows, context + 1] token ids on the CPU. `size`:
        of that batch, where it is not `training.global_batch`.
        `before_update` is called, once or more often, before anything that `saved` gave is changed: it waits for what
        still reads it.
        `judge` may hold the update back: then the state stays as it is, bit for bit."""

    def boxes(self) -> Sequence[TensorBox]:
        """Every box of the state that this rank needs, to be filled in place; `restored` comes after."""

    def frozen(self) -> Sequence[TensorBox]:
        """Every box that this rank needs of what is never trained, and so is no part of the state: to be filled in
        place before the state is restored, from where the weights came from."""

    def restored(self, step: int, scalars: Scalars = MappingProxyType({})) -> None:
        """Take over the state after `step` steps, which the boxes hold now, with the numbers that were saved with it
        (none: every update was applied)."""

    def scalars(self, step: int) -> dict[str, float | int]:
        """The numbers of the state after `step` steps, to be saved with the boxes. May wait for the device."""

    def saved(self) -> Sequence[TensorBox]:
        """The boxes that this rank saves: those of all ranks together make up every tensor exactly once. They are
        views of the living state where possible: copy them before the next step changes it."""

    def replicas(self) -> Mapping[Hashable, Sequence[TensorBox]]:
        """What other ranks hold as well and compute alike: the ranks that have the same key have the same boxes, and
        must hold the same bits in them. Empty where every rank holds a part of its own."""

    def close(self) -> None:
        """Remove what would outlive the process. The engine is of no use then."""


UPDATES = "optimizer.step"  # among the scalars: how many updates were applied


def build_engine(spec: Assignment, vocabulary: int, end_of_text: int) -> Engine:
    """The engine that `parallel.strategy` names. Its state is undefined until `restored`."""
    if spec.parallel.engine == "deepspeed":
        from holdfast.components.train.engines.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, vocabulary, end_of_text)
    from holdfast.components.train.engines.torch.engine import TorchEngine

    return TorchEngine(spec, vocabulary, end_of_text)
