"""Policies that decide where, when and at which size a task starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.simulation.cluster import part_of_day
from holdfast.simulation.policies.base import ROUND, Backfill

if TYPE_CHECKING:
    from holdfast.simulation.engine import Simulation, Task


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
