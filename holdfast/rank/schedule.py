"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.code.load import describe
from holdfast.code.resolve import bind, entered_folder
from holdfast.spec.batch_sizes import BatchSizes
from holdfast.spec.errors import UserCodeError
from holdfast.spec.functions import Function
from holdfast.spec.training import Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of the optimizer step that follows `step` finished ones.

    Linear warm-up over `warmup_steps`, then cosine, linear or no decay, which reaches `final_ratio` of the peak at the
    last step. With `scaling`, the whole schedule follows the batch size of the step: in proportion (Goyal et al. 2017),
    or to its square root (Krizhevsky 2014; Malladi et al. 2022 for Adam). A factor of user code replaces warm-up and
    decay. Raises UserCodeError if it fails, or is no finite number of at least 0.
    """
    schedule = training.schedule
    peak = training.optimizer.learning_rate
    if schedule.base_batch is not None:
        ratio = BatchSizes.of(training).size(step) / schedule.base_batch
        peak *= math.sqrt(ratio) if schedule.scaling == "sqrt" else ratio
    if schedule.factor is not None:
        return peak * _own_factor(schedule.factor, step, training.steps)
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    span = max(1, training.steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    decayed = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * decayed)


def _own_factor(function: Function, step: int, steps: int) -> float:
    folder = entered_folder()
    try:
        factor = _bound(function, folder)(step, steps)
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(f"{function.use}: failed at step {step}: {describe(error, Path(folder))}") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise UserCodeError(f"{function.use}: returned {factor!r} at step {step}; return a finite number of at least 0")
    return float(factor)


@lru_cache(maxsize=4)
def _bound(function: Function, folder: str) -> Callable[..., Any]:
    return bind(function, folder)
