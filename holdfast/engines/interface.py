"""Interface between the training loop and the engine that computes a step.

An engine owns the model, the optimizer and the layout. The loop owns time: which batch, which learning rate, when to
save. State is exchanged as boxes with canonical names, so any engine can continue where another stopped.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.checkpoint import TensorBox
from holdfast.engines.assignment import Assignment
from holdfast.model.decoder import Decoder
from holdfast.objectives.interface import Objective

Scalars = Mapping[str, float | int]  # of the state, saved with its tensors


class Judge(Protocol):
    """A function that decides on the device whether the update of a step is held back: 1.0 or 0.0, or None for
    never."""

    def __call__(self, loss: Tensor, norm: Tensor, excused: Tensor | None = None) -> Tensor | None:
        """`excused` is true if another cause, such as an fp16 overflow, holds the update back. The step is then no
        anomaly."""


@dataclass(frozen=True)
class StepOutput:
    """Measurements of one optimizer step. Tensors stay on the device, so the loop decides when to read them."""

    loss: torch.Tensor  # of the global batch, in nats; for next tokens the mean over the counted ones
    grad_norm: torch.Tensor  # before clipping
    held: torch.Tensor | None = None  # 1.0 if the update was held back; None: it never is
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the objective, by name: scalars


class Engine(Protocol):
    """A model and its optimizer, laid out over the ranks. All methods are collective."""

    @property
    def layout(self) -> dict[str, Any]:
        """The layout of the state, for the manifest."""

    def step(
        self,
        rows: torch.Tensor,
        learning_rate: float,
        before_update: Callable[[], None] = lambda: None,
        judge: Judge | None = None,
        size: int | None = None,
    ) -> StepOutput:
        """Run one optimizer step on this rank's rows of the global batch: [rows, context + 1] token ids on the CPU.
        Rows of generated answers may be shorter, and have scores (see `objectives.interface`).

        `size` is the size of that batch, if not `training.global_batch`. `before_update` is called, once or more often,
        before any tensor that `saved` returned is changed, and waits for its readers. `judge` may hold the update back.
        The state is then unchanged, bit for bit.
        """

    def boxes(self) -> Sequence[TensorBox]:
        """Every box of the state that this rank needs. The caller fills them in place and then calls `restored`."""

    def frozen(self) -> Iterable[TensorBox]:
        """Every box of untrained weights that this rank needs. They are not part of the state. The caller fills each in
        place from the source of the weights before it takes the next, and before it restores the state."""

    def restored(self, step: int, scalars: Scalars = MappingProxyType({})) -> None:
        """Adopt the state after `step` steps, which the boxes hold now, with the scalars saved with it (none: every
        update was applied)."""

    def scalars(self, step: int) -> dict[str, float | int]:
        """The scalars of the state after `step` steps, to save with the boxes. May wait for the device."""

    def saved(self) -> Sequence[TensorBox]:
        """The boxes that this rank saves. Together, those of all ranks contain every tensor exactly once. They are
        views of the live state where possible, so copy them before the next step changes it."""

    def replicas(self) -> Mapping[Hashable, Sequence[TensorBox]]:
        """Boxes that other ranks also hold and compute. Ranks with the same key have the same boxes, and must hold
        the same bits. Empty if no rank shares its part."""

    def close(self) -> None:
        """Remove what would outlive the process. The engine must not be used afterwards."""


class AnsweringEngine(Engine, Protocol):
    """An engine whose model can also answer prompts. With another one, the rules of the spec refuse prompts."""

    def generating(self) -> AbstractContextManager[Decoder]:
        """The whole model, in the arithmetic of training and without gradients, while the context is open."""

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of each target of this rank's rows, without gradients: fp32 [rows, context] on the CPU."""


UPDATES = "optimizer.step"  # name of the scalar that counts applied updates


def build_engine(spec: Assignment, vocabulary: int, end_of_text: int, objective: Objective | None = None) -> Engine:
    """The engine that `parallel.strategy` names. Its state is undefined until `restored`. Without `objective`, it
    minimizes that of `spec`."""
    if spec.parallel.engine == "deepspeed":
        from holdfast.engines.deepspeed.engine import DeepSpeedEngine

        return DeepSpeedEngine(spec, vocabulary, end_of_text, objective)
    from holdfast.engines.torch.engine import TorchEngine

    return TorchEngine(spec, vocabulary, end_of_text, objective)
