"""Learning rate as a pure function of the step."""

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
    last step. `wsd` decays only over the last `decay_steps` (Hu et al. 2024; its `sqrt`: Hägele et al. 2024).
    `inverse_sqrt` falls with the root of the step (Vaswani et al. 2017), and has no last value. With `scaling`, the
    whole schedule follows the batch size of the step: in proportion (Goyal et al. 2017), or to its square root
    (Krizhevsky 2014; Malladi et al. 2022 for Adam). A factor of user code replaces warm-up and decay. Raises
    UserCodeError if it fails, or is no finite number of at least 0.
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
    if schedule.kind == "inverse_sqrt":
        return peak * math.sqrt(schedule.warmup_steps / (step + 1))
    begin, shape = schedule.warmup_steps, str(schedule.kind)
    if schedule.kind == "wsd":
        assert schedule.decay_steps is not None, "the rules require it"
        begin, shape = training.steps - 1 - schedule.decay_steps, schedule.decay_shape
    progress = min(1.0, max(0, step - begin) / max(1, training.steps - 1 - begin))
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * _decayed(shape, progress))


def _decayed(shape: str, progress: float) -> float:
    """What is left of the range of a decay, from 1 to 0, at a `progress` from 0 to 1."""
    match shape:
        case "linear":
            return 1.0 - progress
        case "sqrt":
            return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


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
