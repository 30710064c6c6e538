"""Policies that divide the cluster among tenants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import defaultdict
from typing import TYPE_CHECKING

from holdfast.simulation.cluster import HOUR
from holdfast.simulation.policies.base import DEPTH, Key, Policy

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task

HALF_LIFE = 7 * 24 * HOUR  # of a tenant's usage, for fair share


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
