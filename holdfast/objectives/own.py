"""Objective of user code: a function that returns a loss for each counted target.

The function gets the logits [n, vocabulary] and the targets [n] of the counted targets of a micro-batch. Holdfast adds
the losses, and divides by the number of targets in the global batch. So the result does not depend on how a batch is
divided. The logits exist as a whole, unlike those of the built-in objectives.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.code.load import describe
from holdfast.code.resolve import bind, entered_folder
from holdfast.model.token_logprobs import IGNORED
from holdfast.objectives.interface import MicroBatch, Need, ObjectiveInputs
from holdfast.objectives.next_token import counted_tokens
from holdfast.spec.errors import UserCodeError
from holdfast.spec.training import ObjectiveChoice


class OwnObjective:
    """See `Objective`. A term is a counted target."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logits"})
    terms: tuple[str, ...] = ("own",)
    weights: tuple[float, ...] = (1.0,)

    def __init__(self, objective: ObjectiveChoice) -> None:
        """`objective` names the function. Raises UserCodeError if it cannot be imported."""
        self._use = str(objective.use)
        self._function: Callable[[Tensor, Tensor], Any] = bind(objective)

    def counts(self, rows: Tensor) -> Tensor:
        """See Objective."""
        return counted_tokens(rows)[None]

    def sums(self, given: ObjectiveInputs, batch: MicroBatch) -> Tensor:
        """See Objective. Raises UserCodeError if the function fails, or returns something else than n losses."""
        logits = given.logits
        assert logits is not None
        counted = batch.targets != IGNORED
        total = int(counted.sum())
        if not total:
            return (logits.float().sum() * 0)[None]  # every rank runs a backward pass
        try:
            losses = self._function(logits[counted], batch.targets[counted])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UserCodeError(f"{self._use}: failed: {describe(error, Path(entered_folder()))}") from error
        if not isinstance(losses, Tensor) or losses.shape != (total,) or not losses.is_floating_point():
            kind = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise UserCodeError(
                f"{self._use}: returned {kind}; return one floating-point loss for each of {total} targets"
            )
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise UserCodeError(f"{self._use}: its losses do not depend on the logits; do not detach them")
        return losses.float().sum()[None]
