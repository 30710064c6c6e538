"""Where the state of a step-0 model comes from: seeded initialisation, or imported weights.

Both fill boxes, as a checkpoint does, so that an engine has one way to receive its state at any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.components.checkpoint import TensorBox
from holdfast.components.model.hugging_face import open_weights, require_fit
from holdfast.components.model.initialise import initial_tensor
from holdfast.components.runtime.environment import cache_dir
from holdfast.components.spec.model import Model

MOMENTS = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")


class FirstState(Protocol):
    """Something that knows the state before the first step."""

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """Write the state into `boxes`, in place."""


class SeededState:
    """Random weights, the same at every layout; moments are zero."""

    def __init__(self, model: Model, seed: int) -> None:
        self._model, self._seed = model, seed

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        for box in boxes:
            if not _zero_moment(box):
                _copy(box, initial_tensor(box.name, box.global_shape, self._model, self._seed))


class ImportedState:
    """Weights in the Hugging Face layout; moments are zero."""

    def __init__(self, location: str, model: Model, vocabulary: int) -> None:
        """Open the folder or s3:// URL `location`. Raises DataError when its shape is not the spec's."""
        self._weights = open_weights(location, cache_dir())
        require_fit(self._weights, model, vocabulary)

    def fill(self, boxes: Sequence[TensorBox]) -> None:
        """See FirstState."""
        for box in boxes:
            if not _zero_moment(box):
                _copy(box, self._weights.tensor(box.name))


def _zero_moment(box: TensorBox) -> bool:
    if box.name.startswith(MOMENTS):
        with torch.no_grad():
            box.data.zero_()
        return True
    return False


def _copy(box: TensorBox, whole: torch.Tensor) -> None:
    part = whole[tuple(slice(low, low + size) for low, size in zip(box.offset, box.data.shape, strict=True))]
    with torch.no_grad():
        box.data.copy_(part)
