"""Scheduling policies behind one interface: the order of waiting tasks, overtaking, and eviction.

A policy keeps waiting tasks sorted and is called when time has passed. `POLICIES` lists all of them. No policy sees the
true length of a job, only its owner's estimate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from holdfast.simulation.backfill import Evictor, Reservation, conservative
from holdfast.simulation.cluster import HOUR, part_of_day

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task

Key = tuple[float, ...]
DEPTH = 100  # waiting tasks considered per call; real schedulers have such a limit too
ROUND = 600.0  # seconds between two rounds of policies that evict
HALF_LIFE = 7 * 24 * HOUR  # of a tenant's usage, for fair share


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


class Priority(Backfill):
    """Highest priority first. Lower priorities are evicted, starting with victims that lose the least work."""

    name = "priority"
    round_seconds = ROUND

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (-task.job.priority, task.job.submit)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        evict_for(
            self,
            simulation,
            worse=lambda running, waiting: running.job.priority < waiting.job.priority,
            cost=lambda task: _lost_if_evicted(task, simulation),
        )


class ShortestFirst(Backfill):
    """Least remaining accelerator time first, by the owner's estimate. Longer tasks are evicted."""

    name = "shortest"
    round_seconds = ROUND

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (task.left * task.job.gpus, task.job.submit)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        evict_for(
            self,
            simulation,
            worse=lambda running, waiting: running.left * running.job.gpus > 2 * waiting.left * waiting.job.gpus,
            cost=lambda task: -task.left * task.job.gpus,
        )


class LeastAttained(Backfill):
    """Least attained service first (Tiresias, Gu et al. 2019): the tasks that computed most are evicted. Needs no
    estimate.
    """

    name = "least-attained"
    round_seconds = ROUND

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (task.done * task.job.gpus, task.job.submit)

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        evict_for(
            self,
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
        evict_for(
            self,
            simulation,
            worse=lambda running, waiting: self.level(running) > self.level(waiting),
            cost=lambda task: -self.level(task) * 1e12 - task.since,
        )


class ValueDensity(Backfill):
    """Highest value per accelerator-hour first."""

    name = "value"

    def key(self, task: Task, simulation: Simulation) -> Key:  # noqa: ARG002
        """See Policy."""
        return (-task.job.value / (task.left * task.job.gpus), task.job.submit)


class Topology(Backfill):
    """Gangs wait for one rack, at most a tenth of their length, because spanning racks slows the whole run."""

    name = "topology"
    patience = 0.1

    def try_start(self, task: Task, simulation: Simulation) -> bool:
        """See Policy."""
        if task.job.gpus > simulation.machine.free:
            return False
        if simulation.start(task, same_rack=True):
            return True
        fits_a_rack = any(task.job.gpus <= pool.group.rack * pool.group.gpus for pool in simulation.machine.pools)
        if fits_a_rack and simulation.now - task.waited < self.patience * task.left:
            return False
        return simulation.start(task)


class Cheap(Backfill):
    """Jobs with slack wait for an hour that is cheaper or cleaner than the day's mean."""

    name = "cheap"
    round_seconds = ROUND

    def try_start(self, task: Task, simulation: Simulation) -> bool:
        """See Policy."""
        if simulation.now - task.job.submit < task.job.slack and self._dear(simulation):
            return False
        return super().try_start(task, simulation)

    def _dear(self, simulation: Simulation) -> bool:
        model = simulation.model
        hours = model.price_by_hour or model.carbon_by_hour
        return bool(hours) and part_of_day(hours, simulation.now, 1.0) > sum(hours) / len(hours)


class Elastic(Backfill):
    """Elastic gangs start at their minimum size, grow into idle accelerators, and shrink when a task waits."""

    name = "elastic"
    elastic = True
    round_seconds = ROUND

    def round(self, simulation: Simulation) -> None:
        """See Policy."""
        stretched = [task for task in simulation.running if task.job.min_gpus]
        if self._queue:
            self._shrink(stretched, self._queue[0][2].job.gpus, simulation)
            self.schedule(simulation)
        elif simulation.machine.free:
            for task in sorted(stretched, key=lambda task: (task.gpus / task.job.gpus, task.job.submit)):
                target = task.job.gpus if task.gpus < task.job.gpus else task.job.max_gpus
                # A restart pays only if enough work is left.
                worth = task.left / task.rate > 10 * simulation.model.restart_minutes * 60
                if worth and task.gpus < target and target - task.gpus <= simulation.machine.free:
                    simulation.resize(task, target)

    @staticmethod
    def _shrink(stretched: list[Task], needed: int, simulation: Simulation) -> None:
        for task in sorted(stretched, key=lambda task: -(task.gpus - task.job.min_gpus)):
            if simulation.machine.free >= needed:
                return
            if task.gpus > task.job.gpus:  # extra accelerators are returned first
                simulation.resize(task, task.job.gpus)
            elif task.gpus > task.job.min_gpus:
                simulation.resize(task, task.job.min_gpus)


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


class _Shares(Policy, ABC):
    """The tenant with the least of its share goes first; first come, first served inside a tenant."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, list[tuple[Key, int, Task]]] = defaultdict(list)
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """See Policy."""
        return self._waiting

    def enqueue(self, task: Task, simulation: Simulation) -> None:
        """See Policy."""
        task.key = self.key(task, simulation)
        self._number += 1
        insort(self._queues[task.job.tenant], (task.key, self._number, task))
        self._waiting += 1

    def schedule(self, simulation: Simulation) -> None:
        """See Policy."""
        position = {tenant: 0 for tenant, queue in self._queues.items() if queue}
        for _ in range(DEPTH):
            if not position or not simulation.machine.free:
                return
            tenant = min(position, key=lambda name: (self.share(name, simulation), name))
            queue, index = self._queues[tenant], position[tenant]
            entry = queue.pop(index)
            if self.try_start(entry[2], simulation):
                self._waiting -= 1
            else:
                queue.insert(index, entry)
                position[tenant] = index = index + 1
            if index >= len(queue):
                del position[tenant]

    @abstractmethod
    def share(self, tenant: str, simulation: Simulation) -> float:
        """The usage of a tenant relative to its quota."""


class FairShare(_Shares):
    """Fair share: the tenants' usage, halved every week, relative to their quotas."""

    name = "fair-share"

    def __init__(self) -> None:
        super().__init__()
        self._used: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # (accelerator-seconds, as of)

    def share(self, tenant: str, simulation: Simulation) -> float:
        """See _Shares."""
        used, updated = self._used[tenant]
        return used * 0.5 ** ((simulation.now - updated) / HALF_LIFE) / simulation.model.quotas.get(tenant, 1.0)

    def started(self, task: Task, simulation: Simulation) -> None:
        """See Policy. Counts the estimated usage at the start; otherwise all jobs of a burst would start
        immediately.
        """
        self._count(task, simulation, task.left * task.gpus)

    def stopped(self, task: Task, simulation: Simulation) -> None:
        """See Policy. Returns the unused part."""
        self._count(task, simulation, -task.left * task.job.gpus)

    def _count(self, task: Task, simulation: Simulation, seconds: float) -> None:
        used, then = self._used[task.job.tenant]
        faded = used * 0.5 ** ((simulation.now - then) / HALF_LIFE)
        self._used[task.job.tenant] = (max(0.0, faded + seconds), simulation.now)


class DominantShare(_Shares):
    """Dominant resource fairness (Ghodsi et al. 2011) with the groups of nodes as resources.

    The tenant whose largest share of any group is smallest goes first.
    """

    name = "drf"

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def share(self, tenant: str, simulation: Simulation) -> float:
        """See _Shares."""
        pools = simulation.machine.pools
        largest = max(
            (gpus / (pools[index].group.nodes * pools[index].group.gpus) for index, gpus in self._held[tenant].items()),
            default=0.0,
        )
        return largest / simulation.model.quotas.get(tenant, 1.0)

    def started(self, task: Task, simulation: Simulation) -> None:
        """See Policy."""
        self._change(task, simulation, 1)

    def stopped(self, task: Task, simulation: Simulation) -> None:
        """See Policy."""
        self._change(task, simulation, -1)

    def _change(self, task: Task, simulation: Simulation, sign: int) -> None:
        machine = simulation.machine
        assert task.placement or sign < 0
        pool = machine.pools.index(machine.pool_of[(task.placement or [(0, 0)])[0][0]])
        self._held[task.job.tenant][pool] += sign * task.gpus


def evict_for(
    policy: Policy,
    simulation: Simulation,
    worse: Callable[[Task, Task], bool],
    cost: Callable[[Task], float],
) -> None:
    """Evict tasks for waiting ones, in queue order: the `worse` tasks with the least `cost` first."""
    evictor = Evictor(simulation, sorted(simulation.running, key=cost))
    for entry in list(_heads(policy)):
        task = entry[2]
        victims = evictor.victims(task, worse)
        if victims is None:
            continue
        policy._queue.remove(entry)
        for victim in victims:
            simulation.evict(victim)
        if not simulation.start(task):
            insort(policy._queue, entry)


def _heads(policy: Policy) -> Iterator[tuple[Key, int, Task]]:
    yield from policy._queue[:16]


def _lost_if_evicted(task: Task, simulation: Simulation) -> float:
    """Accelerator-seconds that an eviction costs: the restart, and without enough notice the work since
    the checkpoint.
    """
    model = simulation.model
    age = (
        0.0 if model.grace_seconds >= model.save_seconds else (task.done - task.saved) % (model.checkpoint_minutes * 60)
    )
    return (model.restart_minutes * 60 + age) * task.gpus


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy,
            Backfill,
            Easy,
            Conservative,
            Priority,
            FairShare,
            DominantShare,
            FeedbackQueues,
            LeastAttained,
            ShortestFirst,
            ValueDensity,
            Topology,
            Cheap,
            Elastic,
            Learned,
        )
    }
)
