"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from holdfast.spec.training import BatchSizes, Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of the optimizer step that follows `step` finished ones.

    Linear warm-up over `warmup_steps`, then cosine, linear or no decay, which reaches `final_ratio` of the peak at the
    last step. With `scaling`, the whole schedule follows the batch size of the step: in proportion (Goyal et al. 2017),
    or to its square root (Krizhevsky 2014; Malladi et al. 2022 for Adam).
    """
    schedule = training.schedule
    peak = training.optimizer.learning_rate
    if schedule.base_batch is not None:
        ratio = BatchSizes.of(training).size(step) / schedule.base_batch
        peak *= math.sqrt(ratio) if schedule.scaling == "sqrt" else ratio
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    span = max(1, training.steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    decayed = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_ratio + (1.0 - schedule.final_ratio) * decayed)
