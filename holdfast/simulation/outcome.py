"""Metrics of a simulation, and bounds that no policy can beat.

Waiting is the time from submission to the first start plus every later wait. Slow-down is bounded (Feitelson 2001):
time in the system over max(run time, 10 minutes), at least 1.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from holdfast.simulation.cluster import HOUR, ClusterModel, Job, part_of_day
from holdfast.simulation.machine import Machine

if TYPE_CHECKING:
    from holdfast.simulation.engine import Task

SHORTEST = 600.0  # seconds; a shorter job does not increase a slow-down
SAMPLES = 2000  # points of the utilization curve


@dataclass(frozen=True)
class Outcome:
    """The metrics of one policy on one trace."""

    policy: str
    jobs: int
    makespan: float  # seconds from the first submission to the last end
    utilisation: float  # held share of the available accelerator time while any job ran or waited
    goodput: float  # same, but only time with progress that was not lost
    wait_mean: float  # seconds
    wait_p50: float
    wait_p99: float
    flow_mean: float  # seconds from submission to end
    slowdown_mean: float
    slowdown_p99: float
    fairness: float  # Jain's index over the tenants' mean slow-downs: 1 is even
    fragmentation: float  # share of idle accelerator time while jobs waited that was on partly used nodes
    lost_hours: float  # accelerator-hours computed twice
    overhead_hours: float  # accelerator-hours of restarts
    evictions: int
    failures: int
    reclaims: int
    resizes: int
    cost: float
    kilograms_co2: float
    value_on_time: float  # share of the jobs' value that finished within twice its run time plus an hour
    tenant_waits: Mapping[str, float] = field(repr=False, default_factory=dict)  # mean, seconds
    curve: tuple[tuple[float, float, int], ...] = field(repr=False, default=())  # (second, busy share, jobs waiting)


class Totals:
    """Running sums of a simulation."""

    def __init__(self, model: ClusterModel) -> None:
        self._model = model
        self._last = 0.0
        self._up = self._busy = self._idle_waiting = self._fragments = 0.0
        self._waits: dict[str, float] = defaultdict(float)
        self.lost_work = self.overhead = 0.0  # accelerator-seconds
        self.evictions = self.failures = self.reclaims = self.resizes = 0
        self._cost = self._grams = 0.0
        self._curve: list[tuple[float, float, int]] = []
        self._watts = sum(group.watts * group.nodes * group.gpus for group in model.groups) / model.gpus
        self._price = {group.name: group.price for group in model.groups}

    def advance(self, now: float, machine: Machine, busy: int, waiting: int) -> None:
        """Count the time since the last event, in which nothing changed."""
        span = now - self._last
        if span <= 0:
            return
        if busy or waiting:
            self._up += span * machine.up
            self._busy += span * busy
            if waiting:
                idle = machine.free
                self._idle_waiting += span * idle
                self._fragments += span * min(idle, machine.partly_free())
            if busy:
                kilowatt_hours = busy * self._watts / 1000 * span / HOUR
                self._grams += kilowatt_hours * part_of_day(self._model.carbon_by_hour, self._last, 0.0)
                factor = part_of_day(self._model.price_by_hour, self._last, 1.0)
                for pool in machine.pools:
                    self._cost += (pool.up - pool.free) * self._price[pool.group.name] * factor * span / HOUR
        self._curve.append((self._last, busy / machine.up if machine.up else 0.0, waiting))
        self._last = now

    def waited(self, task: Task, now: float) -> None:
        """Record the end of a wait."""
        self._waits[task.job.id] += now - task.waited

    def outcome(self, policy: str, tasks: Sequence[Task]) -> Outcome:
        """The outcome from all sums."""
        waits = np.array([self._waits[task.job.id] for task in tasks])
        flows = np.array([task.finished - task.job.submit for task in tasks])
        seconds = np.array([task.job.seconds for task in tasks])
        slowdowns = np.maximum(1.0, flows / np.maximum(seconds, SHORTEST))
        tenants: dict[str, list[float]] = defaultdict(list)
        tenant_waits: dict[str, list[float]] = defaultdict(list)
        for task, slowdown, wait in zip(tasks, slowdowns, waits, strict=True):
            tenants[task.job.tenant].append(float(slowdown))
            tenant_waits[task.job.tenant].append(float(wait))
        means = np.array([np.mean(values) for values in tenants.values()])
        useful = sum(task.job.work for task in tasks)
        value = sum(task.job.value for task in tasks)
        on_time = sum(
            task.job.value for task, flow in zip(tasks, flows, strict=True) if flow <= 2 * task.job.seconds + HOUR
        )
        return Outcome(
            policy=policy,
            jobs=len(tasks),
            makespan=max(task.finished for task in tasks) - min(task.job.submit for task in tasks),
            utilisation=self._busy / self._up if self._up else 0.0,
            goodput=min(1.0, useful / self._up) if self._up else 0.0,
            wait_mean=float(waits.mean()),
            wait_p50=float(np.percentile(waits, 50)),
            wait_p99=float(np.percentile(waits, 99)),
            flow_mean=float(flows.mean()),
            slowdown_mean=float(slowdowns.mean()),
            slowdown_p99=float(np.percentile(slowdowns, 99)),
            fairness=float(means.sum() ** 2 / (len(means) * (means**2).sum())),
            fragmentation=self._fragments / self._idle_waiting if self._idle_waiting else 0.0,
            lost_hours=self.lost_work / HOUR,
            overhead_hours=self.overhead / HOUR,
            evictions=self.evictions,
            failures=self.failures,
            reclaims=self.reclaims,
            resizes=self.resizes,
            cost=self._cost,
            kilograms_co2=self._grams / 1000,
            value_on_time=on_time / value if value else 0.0,
            tenant_waits={name: float(np.mean(values)) for name, values in sorted(tenant_waits.items())},
            curve=_thinned(self._curve),
        )


@dataclass(frozen=True)
class Bounds:
    """Bounds for any policy on a trace without failures and elastic jobs."""

    makespan: float  # seconds, at least
    utilisation: float  # at most, over the makespan bound
    flow_mean: float  # seconds, at least
    wait_mean: float  # seconds, at least


def bounds(model: ClusterModel, jobs: Sequence[Job]) -> Bounds:
    """Bounds from relaxations: the cluster becomes one machine as fast as all its accelerators, and gangs may be split.

    Then shortest-remaining-work-first has the least mean time in the system (Schrage 1968), and no work ends before the
    whole machine could do it. No job ends before its run time on the fastest accelerator.
    """
    fastest = max(group.speed for group in model.groups)
    capacity = sum(group.nodes * group.gpus * group.speed for group in model.groups)
    ordered = sorted(jobs, key=lambda job: job.submit)
    ends = _shortest_remaining([(job.submit, job.work / capacity) for job in ordered])
    own = [job.seconds / fastest for job in ordered]
    flow = max(float(np.mean([end - job.submit for end, job in zip(ends, ordered, strict=True)])), float(np.mean(own)))
    own_ends = (job.submit + seconds for job, seconds in zip(ordered, own, strict=True))
    makespan = max(*ends, *own_ends) - ordered[0].submit
    return Bounds(
        makespan=makespan,
        utilisation=min(1.0, sum(job.work for job in ordered) / (capacity * makespan)),
        flow_mean=flow,
        wait_mean=max(0.0, flow - float(np.mean([job.seconds for job in ordered]))),
    )


def _shortest_remaining(arrivals: Iterable[tuple[float, float]]) -> list[float]:
    """The end of each job (arrival, work) on one machine that always works on the job with the least work left."""
    arrivals = list(arrivals)
    ends = [0.0] * len(arrivals)
    heap: list[tuple[float, int]] = []
    now, index = 0.0, 0
    while heap or index < len(arrivals):
        if not heap:
            now = max(now, arrivals[index][0])
        while index < len(arrivals) and arrivals[index][0] <= now:
            heapq.heappush(heap, (arrivals[index][1], index))
            index += 1
        remaining, job = heapq.heappop(heap)
        until = arrivals[index][0] if index < len(arrivals) else float("inf")
        if now + remaining <= until:
            now += remaining
            ends[job] = now
        else:
            heapq.heappush(heap, (remaining - (until - now), job))
            now = until
    return ends


def _thinned(curve: list[tuple[float, float, int]]) -> tuple[tuple[float, float, int], ...]:
    stride = max(1, len(curve) // SAMPLES)
    return tuple(curve[::stride])
