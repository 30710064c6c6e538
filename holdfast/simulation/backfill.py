"""Backfill and eviction: which waiting jobs start early, and which running ones make room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task

RECKONED_EVERY = 60.0  # seconds for which a reservation is valid
BUCKETS = 256  # points of a profile of free accelerators over time


class Reservation:
    """The reservation of the head of a queue: when enough is free by the owners' estimates, and what else is free."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, int]] = []  # (expected end, number, accelerators) of running tasks, sorted
        self._entry: dict[Task, tuple[float, int, int]] = {}
        self._number = 0
        self._head: Task | None = None
        self._reckoned = 0.0
        self._shadow, self._extra, self._gang = 0.0, 0, False

    def began(self, task: Task) -> None:
        """Record that a task got its place."""
        self.ended(task)
        self._number += 1
        entry = (task.ends(), self._number, task.gpus)
        self._entry[task] = entry
        insort(self._ends, entry)

    def ended(self, task: Task) -> None:
        """Record that a task lost its place."""
        entry = self._entry.pop(task, None)
        if entry is not None:
            del self._ends[bisect_left(self._ends, entry)]

    def allows(self, task: Task, head: Task, simulation: Simulation) -> bool:
        """Whether `task` may start now: it ends before the head starts, or uses only what the head leaves free."""
        if head is not self._head or simulation.now - self._reckoned > RECKONED_EVERY:
            self._reckon(head, simulation)
        if self._gang and simulation.machine.fits_in_pieces(task.job.gpus, task.job.group):
            return True
        return task.job.gpus <= self._extra or simulation.now + task.left <= self._shadow

    def spend(self, task: Task, simulation: Simulation) -> None:
        """Record the start of an allowed task."""
        in_pieces = self._gang and len(task.placement or ()) == 1 and task.gpus < simulation.machine.pools[0].group.gpus
        if simulation.now + task.left > self._shadow and not in_pieces:
            self._extra -= task.job.gpus

    def _reckon(self, head: Task, simulation: Simulation) -> None:
        node_gpus = min(pool.group.gpus for pool in simulation.machine.pools)
        self._gang = gang = head.job.gpus >= node_gpus  # it needs whole nodes, so partly free nodes do not help
        free = simulation.machine.free - (simulation.machine.partly_free() if gang else 0)
        self._head, self._reckoned, self._shadow = head, simulation.now, simulation.now
        for end, _, gpus in self._ends:
            if free >= head.job.gpus:
                break
            if gang and gpus < node_gpus:
                continue
            free += gpus
            self._shadow = max(simulation.now, end)
        self._extra = free - head.job.gpus


def conservative(waiting: Sequence[Task], simulation: Simulation) -> list[Task]:
    """Those of `waiting`, in their order, that may start now.

    Each gets the first period that is free for its expected run time. None gets a period that an earlier task has.
    """
    now = simulation.now
    ends = sorted((max(now, task.ends()), task.gpus) for task in simulation.running)
    if len(ends) > BUCKETS:  # rounded up: accelerators are never counted as free too early
        stride = -(-len(ends) // BUCKETS)
        ends = [(group[-1][0], sum(gpus for _, gpus in group)) for group in _chunks(ends, stride)]
    times = np.array([now, *(end for end, _ in ends)])
    free = simulation.machine.free + np.cumsum([0, *(gpus for _, gpus in ends)])
    starting = []
    for task in waiting:
        need, length = task.job.gpus, task.left
        enough = free >= need
        if not simulation.machine.fits(need, task.job.group, task.job.same_rack):
            enough[0] = False  # enough is free, but in fragments
        for index in np.flatnonzero(enough):
            stop = int(np.searchsorted(times, times[index] + length))
            if enough[index:stop].all():
                break
        else:
            continue  # more than the cluster has
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


# Selection of victims for a gang: few and cheap tasks that clear what it needs, node by node.


class Evictor:
    """Victims among the currently running tasks, cheapest first. Create one for each round."""

    def __init__(self, simulation: Simulation, candidates: Sequence[Task]) -> None:
        self._simulation, self._candidates = simulation, list(candidates)

    def victims(self, task: Task, worse: Callable[[Task, Task], bool]) -> list[Task] | None:
        """Running tasks whose places make room for `task`, all of them `worse`; None if there is no such set.

        The returned tasks are no longer candidates.
        """
        machine = self._simulation.machine
        gain: dict[int, int] = defaultdict(int)
        on_node: dict[int, list[Task]] = defaultdict(list)
        cleared: list[int] = []
        for victim in self._candidates:
            if victim.placement is None or not worse(victim, task):
                continue
            pool = machine.pool_of[victim.placement[0][0]]
            size = pool.group.gpus
            if task.job.group and pool.group.name != task.job.group:
                continue
            nodes, rest = divmod(task.job.gpus, size)
            nodes_needed = nodes + (rest > 0)
            for node, count in victim.placement:
                gain[node] += count
                on_node[node].append(victim)
                need = size if nodes else rest
                had = gain[node] - count + pool.free_on(node)
                if had < need <= had + count:
                    cleared.append(node)
            idle = pool.whole if nodes else 0
            if len(cleared) + idle >= nodes_needed:
                chosen = {victim: None for node in cleared[: nodes_needed - idle] for victim in on_node[node]}
                self._candidates = [other for other in self._candidates if other not in chosen]
                return list(chosen)
        return None
