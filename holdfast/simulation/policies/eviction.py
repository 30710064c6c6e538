"""Policies that evict running tasks for waiting ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.simulation.backfill import Evictor
from holdfast.simulation.cluster import HOUR
from holdfast.simulation.policies.base import ROUND, Backfill, Key

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task

HEADS = 16  # waiting tasks that may evict in one round


class _Evicting(Backfill):
    """Backfill that also evicts, every `round_seconds`."""

    round_seconds = ROUND

    def evict_for_waiting(
        self, simulation: Simulation, worse: Callable[[Task, Task], bool], cost: Callable[[Task], float]
    ) -> None:
        """Evict tasks for waiting ones, in queue order: the `worse` tasks with the least `cost` first."""
        evictor = Evictor(simulation, sorted(simulation.running, key=cost))
        for entry in self._queue[:HEADS]:
            task = entry[2]
            victims = evictor.victims(task, worse)
            if victims is None:
                continue
            self._queue.remove(entry)
            for victim in victims:
                simulation.evict(victim)
            if not simulation.start(task):
                insort(self._queue, entry)


class Priority(_Evicting):
    """Highest priority first. Lower priorities are evicted, starting with victims that lose the least work."""

    name = "priority"

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (-task.job.priority, task.job.submit)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        self.evict_for_waiting(
            simulation,
            worse=lambda running, waiting: running.job.priority < waiting.job.priority,
            cost=lambda task: _lost_if_evicted(task, simulation),
        )


class ShortestFirst(_Evicting):
    """Least remaining accelerator time first, by the owner's estimate. Longer tasks are evicted."""

    name = "shortest"

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (task.left * task.job.gpus, task.job.submit)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        self.evict_for_waiting(
            simulation,
            worse=lambda running, waiting: running.left * running.job.gpus > 2 * waiting.left * waiting.job.gpus,
            cost=lambda task: -task.left * task.job.gpus,
        )


class LeastAttained(_Evicting):
    """Least attained service first (Tiresias, Gu et al. 2019): the tasks that computed most are evicted. Needs no
    estimate.
    """

    name = "least-attained"

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (task.done * task.job.gpus, task.job.submit)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        self.evict_for_waiting(
            simulation,
            worse=lambda running, waiting: (
                running.done * running.job.gpus > HOUR * waiting.job.gpus + waiting.done * waiting.job.gpus
            ),
            cost=lambda task: -task.done * task.job.gpus,
        )


class FeedbackQueues(LeastAttained):
    """Multi-level feedback: a job drops to a lower queue with more service; first come, first served inside a queue."""

    name = "feedback"
    levels = (HOUR, 8 * HOUR, 64 * HOUR)  # attained accelerator-seconds at which a job drops

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (self.level(task), task.job.submit)

    def level(self, task: Task) -> int:
        """The queue of a task; 0 is served first."""
        return bisect_left(self.levels, task.done * task.job.gpus)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        self.evict_for_waiting(
            simulation,
            worse=lambda running, waiting: self.level(running) > self.level(waiting),
            cost=lambda task: -self.level(task) * 1e12 - task.since,
        )


def _lost_if_evicted(task: Task, simulation: Simulation) -> float:
    """Accelerator-seconds that an eviction costs: the restart, and without enough notice the work since
    the checkpoint.
    """
    model = simulation.model
    age = (
        0.0 if model.grace_seconds >= model.save_seconds else (task.done - task.saved) % (model.checkpoint_minutes * 60)
    )
    return (model.restart_minutes * 60 + age) * task.gpus
