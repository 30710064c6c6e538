"""Backfill with reservations: a task overtakes only if it delays none that has one."""

from __future__ import annotations

import math
from bisect import insort
from typing import TYPE_CHECKING

from holdfast.simulation.backfill import Reservation, conservative
from holdfast.simulation.policies.base import DEPTH, Policy

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task


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
