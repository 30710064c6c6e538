"""Reservations: when a waiting gang can start at the latest, and who may run before it without delaying it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task

RECKONED_EVERY = 60.0  # seconds for which a reservation holds
BUCKETS = 256  # points of a profile of free accelerators over time


class Reservation:
    """The reservation of the head of a queue: the moment at which, by the owners' estimates, enough is free, and what
    is free beside it then."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, int]] = []  # (expected end, number, accelerators) of what runs, sorted
        self._entry: dict[Task, tuple[float, int, int]] = {}
        self._number = 0
        self._head: Task | None = None
        self._reckoned = 0.0
        self._shadow, self._extra, self._gang = 0.0, 0, False

    def began(self, task: Task) -> None:
        """A task got its place."""
        self.ended(task)
        self._number += 1
        entry = (task.ends(), self._number, task.gpus)
        self._entry[task] = entry
        insort(self._ends, entry)

    def ended(self, task: Task) -> None:
        """A task lost its place."""
        entry = self._entry.pop(task, None)
        if entry is not None:
            del self._ends[bisect_left(self._ends, entry)]

    def allows(self, task: Task, head: Task, simulation: Simulation) -> bool:
        """Whether `task` may start now: it ends before the head's turn, or takes what the head leaves over."""
        if head is not self._head or simulation.now - self._reckoned > RECKONED_EVERY:
            self._reckon(head, simulation)
        if self._gang and simulation.machine.fits_in_pieces(task.job.gpus, task.job.group):
            return True
        return task.job.gpus <= self._extra or simulation.now + task.left <= self._shadow

    def spend(self, task: Task, simulation: Simulation) -> None:
        """A task that was allowed has started."""
        in_pieces = self._gang and len(task.placement or ()) == 1 and task.gpus < simulation.machine.pools[0].group.gpus
        if simulation.now + task.left > self._shadow and not in_pieces:
            self._extra -= task.job.gpus

    def _reckon(self, head: Task, simulation: Simulation) -> None:
        whole = min(pool.group.gpus for pool in simulation.machine.pools)
        self._gang = gang = head.job.gpus >= whole  # it needs whole nodes: what lies free in pieces is no use to it
        free = simulation.machine.free - (simulation.machine.partly_free() if gang else 0)
        self._head, self._reckoned, self._shadow = head, simulation.now, simulation.now
        for end, _, gpus in self._ends:
            if free >= head.job.gpus:
                break
            if gang and gpus < whole:
                continue
            free += gpus
            self._shadow = max(simulation.now, end)
        self._extra = free - head.job.gpus


def conservative(waiting: Sequence[Task], simulation: Simulation) -> list[Task]:
    """Of `waiting`, in their order, those that may start now: each gets the first stretch that is free for as long as
    it expects to run, and none a stretch that another one ahead of it has."""
    now = simulation.now
    ends = sorted((max(now, task.ends()), task.gpus) for task in simulation.running)
    if len(ends) > BUCKETS:  # later than true, never sooner: nobody is promised what is not there
        stride = -(-len(ends) // BUCKETS)
        ends = [(group[-1][0], sum(gpus for _, gpus in group)) for group in _chunks(ends, stride)]
    times = np.array([now, *(end for end, _ in ends)])
    free = simulation.machine.free + np.cumsum([0, *(gpus for _, gpus in ends)])
    starting = []
    for task in waiting:
        need, length = task.job.gpus, task.left
        enough = free >= need
        if not simulation.machine.fits(need, task.job.group, task.job.same_rack):
            enough[0] = False  # enough is free, and it lies in pieces
        for index in np.flatnonzero(enough):
            stop = int(np.searchsorted(times, times[index] + length))
            if enough[index:stop].all():
                break
        else:
            continue  # more than there is
        until = times[index] + length
        if stop == len(times) or times[stop] != until:
            times = np.insert(times, stop, until)
            free = np.insert(free, stop, free[stop - 1])
        free[index:stop] -= need
        if index == 0:
            starting.append(task)
    return starting


def _chunks(items: list[tuple[float, int]], size: int) -> list[list[tuple[float, int]]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
