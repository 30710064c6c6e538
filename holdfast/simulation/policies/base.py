"""The interface of a policy, and those that only order the queue: with and without overtaking or reservations."""

from __future__ import annotations

import math
from bisect import insort
from typing import TYPE_CHECKING

from holdfast.simulation.backfill import Reservation, conservative
from holdfast.simulation.cluster import HOUR

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task

Key = tuple[float, ...]
DEPTH = 100  # waiting tasks considered per call; real schedulers have such a limit too
ROUND = 600.0  # seconds between two calls of `round`, for policies that use it


class Policy:
    """First come, first served: the head of the queue blocks all tasks behind it. Base class of all policies."""

    name = "fifo"
    round_seconds: float | None = None
    elastic = False  # whether elastic gangs start small, shrink and grow
    overtake = False  # whether a task may start before an earlier one that does not fit

    def __init__(self) -> None:
        self._queue: list[tuple[Key, int, Task]] = []
        self._number = 0

    @property
    def waiting(self) -> int:
        """The number of waiting tasks."""
        return len(self._queue)

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """The position in the queue, lowest first. It is constant while the task waits."""
        return (task.job.submit,)

    def enqueue(self, task: Task, simulation: Simulation) -> None:
        """Add a waiting task."""
        task.key = self.key(task, simulation)
        self._number += 1
        insort(self._queue, (task.key, self._number, task))

    def schedule(self, simulation: Simulation) -> None:
        """Start tasks after a change."""
        queue, index = self._queue, 0
        while index < min(len(queue), DEPTH if self.overtake else len(queue)):
            if simulation.machine.free == 0:
                return
            entry = queue.pop(index)
            if not self.try_start(entry[2], simulation):
                queue.insert(index, entry)
                if not self.overtake:
                    return
                index += 1

    def try_start(self, task: Task, simulation: Simulation) -> bool:
        """Start a task if it fits, and if this policy wants it to start now."""
        return (task.job.gpus <= simulation.machine.free or bool(task.job.min_gpus)) and simulation.start(task)

    def round(self, simulation: Simulation) -> None:
        """Called every `round_seconds`; `done` of every running task is up to date."""

    def started(self, task: Task, simulation: Simulation) -> None:
        """Called when a task got its place, or another size."""

    def stopped(self, task: Task, simulation: Simulation) -> None:
        """Called when a task lost its place, at its end or before."""

    def left(self, task: Task, simulation: Simulation) -> None:
        """Called when a task has finished."""


class Backfill(Policy):
    """First come, first served, but smaller tasks overtake if they fit: large gangs may starve."""

    name = "backfill"
    overtake = True


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


class Easy(Policy):
    """EASY backfill (Lifka 1995): the head of the queue has a reservation. No task overtakes if it would delay it."""

    name = "easy"

    def __init__(self) -> None:
        super().__init__()
        self._reservation = Reservation()

    def schedule(self, simulation: Simulation) -> None:
        """See Policy."""
        super().schedule(simulation)
        if not self._queue or simulation.machine.free == 0:
            return
        head = self._queue[0][2]
        index = 1
        while index < min(len(self._queue), DEPTH) and simulation.machine.free:
            entry = self._queue[index]
            task = entry[2]
            if task.job.gpus <= simulation.machine.free and self._reservation.allows(task, head, simulation):
                del self._queue[index]
                if simulation.start(task):
                    self._reservation.spend(task, simulation)
                    continue
                self._queue.insert(index, entry)
            index += 1

    def started(self, task: Task, simulation: Simulation) -> None:  # noqa: ARG002
        """See Policy."""
        self._reservation.began(task)

    def stopped(self, task: Task, simulation: Simulation) -> None:  # noqa: ARG002
        """See Policy."""
        self._reservation.ended(task)


class Conservative(Policy):
    """Conservative backfill (Mu'alem and Feitelson 2001): all tasks near the head have reservations.

    No task overtakes if it would delay any of them. The plan is recomputed every few minutes.
    """

    name = "conservative"
    planned_every = 300.0

    def __init__(self) -> None:
        super().__init__()
        self._planned = -math.inf

    def schedule(self, simulation: Simulation) -> None:
        """See Policy."""
        super().schedule(simulation)
        if not self._queue or not simulation.machine.free:
            return
        if simulation.now - self._planned < self.planned_every and simulation.arrived > 1:
            return
        self._planned = simulation.now
        chosen = set(conservative([entry[2] for entry in self._queue[:DEPTH]], simulation))
        for entry in [entry for entry in self._queue[:DEPTH] if entry[2] in chosen]:
            self._queue.remove(entry)
            if not simulation.start(entry[2]):
                insort(self._queue, entry)
