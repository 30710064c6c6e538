"""The interface of a policy, and the two simplest: with and without overtaking."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

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
