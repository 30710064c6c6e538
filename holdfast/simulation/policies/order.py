"""Policies that only order the queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holdfast.simulation.cluster import HOUR
from holdfast.simulation.policies.base import Backfill, Key

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task


class ValueDensity(Backfill):
    """Highest value per accelerator-hour first."""

    name = "value"

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (-task.job.value / (task.left * task.job.gpus), task.job.submit)


class Learned(Backfill):
    """A linear score of values known at submission. Age counts, so no job starves.

    `learn` found the weights by the cross-entropy method on synthetic traces (lowest mean bounded slow-down).
    """

    name = "learned"
    # Of hours of submission, log2 of the gang size, log2 of the estimated seconds; from `holdfast.simulation.learn`.
    weights: tuple[float, ...] = (0.032, 1.86, 1.273)

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        job = task.job
        features = (job.submit / HOUR, math.log2(job.gpus), math.log2(task.left))
        return (sum(weight * feature for weight, feature in zip(self.weights, features, strict=True)), job.submit)
