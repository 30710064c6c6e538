"""Event loop: jobs arrive, start, are disturbed and finish; nodes fail, are reclaimed, lent and repaired.

The computed, lost and waiting times of a task add up under any policy. A policy sees the simulation through `running`,
`machine`, and the methods `start`, `evict` and `resize`. It never changes the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.simulation.cluster import DAY, HOUR, ClusterModel, Job, NodeGroup, part_of_day
from holdfast.simulation.machine import Machine, Placement
from holdfast.simulation.outcome import Outcome, Totals

if TYPE_CHECKING:
    from holdfast.simulation.policies import Policy

ARRIVE, FINISH, FAIL, REPAIR, RECLAIM, TIDE, ROUND = range(7)


class Task:
    """A job in the simulation."""

    __slots__ = (
        "began",
        "done",
        "finished",
        "gpus",
        "job",
        "key",
        "placement",
        "rate",
        "ready",
        "saved",
        "since",
        "starts",
        "waited",
    )

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0.0  # computed part of `job.seconds`
        self.saved = 0.0  # part of `done` up to the last checkpoint
        self.placement: Placement | None = None
        self.gpus = 0  # currently held
        self.rate = 0.0  # increase of `done` per second
        self.ready = self.since = 0.0  # start of computation; time up to which `done` is counted
        self.starts = 0
        self.waited = 0.0  # start of the current wait
        self.began = self.finished = -1.0  # first start, end
        self.key: tuple[float, ...] = ()  # its position in the policy's queue

    @property
    def left(self) -> float:
        """The remaining seconds by the owner's estimate, at least 60."""
        return max(60.0, (self.job.estimate or self.job.seconds) - self.done)

    def ends(self) -> float:
        """The expected end by the owner's estimate."""
        return max(self.ready, self.since) + self.left / self.rate


class Simulation:
    """One run of a policy. Use `simulate`."""

    def __init__(self, model: ClusterModel, jobs: Sequence[Job], policy: Policy, seed: int) -> None:
        self.model, self.policy = model, policy
        self.machine = Machine(model)
        self.now = 0.0
        self.running: dict[Task, None] = {}
        self.arrived = 0
        self._tasks = [Task(job) for job in sorted(jobs, key=lambda job: job.submit)]
        self._random = np.random.Generator(np.random.PCG64([seed, 1]))
        self._events: list[tuple[float, int, int, Any, int]] = []
        self._order = 0
        self._on_node: list[dict[Task, None]] = [{} for _ in self.machine.pool_of]
        self._reasons_down = [0] * len(self.machine.pool_of)
        self._lent: set[int] = set()
        self._unfinished = len(self._tasks)
        self._checkpoint = model.checkpoint_minutes * 60
        self._restart = model.restart_minutes * 60
        self.totals = Totals(model)

    def run(self) -> Outcome:
        """Run until every job has finished."""
        for task in self._tasks:
            self._at(task.job.submit, ARRIVE, task)
        for index in range(len(self.machine.pools)):
            self._next_disturbance(FAIL, index)
            self._next_disturbance(RECLAIM, index)
        if any(pool.group.inference_share for pool in self.machine.pools):
            self._at(0.0, TIDE, None)
        if self.policy.round_seconds:
            self._at(self.policy.round_seconds, ROUND, None)
        events = self._events
        handlers: tuple[Callable[[Any], None], ...] = (
            self._arrive,
            self._finish,
            self._fail,
            self._repair,
            self._reclaim,
            self._tide,
            self._round,
        )
        while self._unfinished and events:
            self.now = events[0][0]
            self.totals.advance(self.now, self.machine, self._busy, self.policy.waiting)
            acted = False
            while events and events[0][0] == self.now:
                _, _, kind, subject, start = heapq.heappop(events)
                if kind == FINISH and (subject not in self.running or subject.starts != start):
                    continue  # it was disturbed, and ends at another time
                handlers[kind](subject)
                acted = True
            if acted:
                self.policy.schedule(self)
        if self._unfinished:
            raise ValueError(f"{self._unfinished} jobs never fit into {self.model.name}: ask for less than it has")
        return self.totals.outcome(self.policy.name, self._tasks)

    # Methods for policies.

    def start(self, task: Task, same_rack: bool = False) -> bool:
        """Start a waiting task if its whole gang fits; otherwise nothing changes. `same_rack`: only inside one rack."""
        job = task.job
        placement = self.machine.place(job.gpus, job.group, same_rack or job.same_rack)
        if placement is None and job.min_gpus and self.policy.elastic:
            placement = self.machine.place(job.min_gpus, job.group, same_rack or job.same_rack)
        if placement is None:
            return False
        if task.began < 0:
            task.began = self.now
        self.totals.waited(task, self.now)
        self._begin(task, placement, self._restart if task.starts else 0.0)
        return True

    def evict(self, task: Task, notice: float | None = None) -> None:
        """Evict a running task with `notice` seconds (default: the cluster's grace).

        With enough notice to save, it loses only the restart time; otherwise also the work since the last checkpoint.
        """
        notice = self.model.grace_seconds if notice is None else notice
        self._end_stretch(task, saved=notice >= self.model.save_seconds)
        self.totals.evictions += 1
        self._wait(task)

    def resize(self, task: Task, gpus: int) -> bool:
        """Resize a running elastic task. Returns False, without any change, if it does not fit."""
        assert task.placement is not None
        placement = list(task.placement)
        more = gpus - task.gpus
        if more > 0:
            extra = self.machine.place(more, task.job.group)
            if extra is None:
                return False
            placement = _merged(placement, extra)
        self._accrue(task)
        if more < 0:
            self.machine.release(_shrink(placement, -more))
        self._leave_nodes(task)
        self.totals.resizes += 1
        self._begin(task, placement, self._restart)
        return True

    # Events.

    def _arrive(self, task: Task) -> None:
        self.arrived += 1
        self._wait(task)

    def _finish(self, task: Task) -> None:
        self._end_stretch(task, saved=True)
        task.finished = self.now
        self._unfinished -= 1
        self.policy.left(task, self)

    def _fail(self, pool: int) -> None:
        group, node = self._victim_node(pool)
        self._next_disturbance(FAIL, pool)
        if not self._reasons_down[node]:
            self.totals.failures += 1
            self._down(node, notice=0.0)
            self._at(self.now + self._random.exponential(group.repair_hours * HOUR), REPAIR, node)

    def _reclaim(self, pool: int) -> None:
        group, node = self._victim_node(pool)
        self._next_disturbance(RECLAIM, pool)
        if not self._reasons_down[node]:
            self.totals.reclaims += 1
            self._down(node, notice=self.model.grace_seconds)
            self._at(self.now + self._random.exponential(group.repair_hours * HOUR), REPAIR, node)

    def _repair(self, node: int) -> None:
        self._up(node)

    def _tide(self, _: None) -> None:
        """Inference takes nodes, the last ones of a group first, or returns them."""
        soonest = DAY
        first = 0
        for pool in self.machine.pools:
            group = pool.group
            if parts := len(group.inference_share):
                share = part_of_day(group.inference_share, self.now, 0.0)
                boundary = first + group.nodes - round(group.nodes * share)
                for node in range(first, first + group.nodes):
                    if node >= boundary and node not in self._lent:
                        self._lent.add(node)
                        self._down(node, notice=self.model.grace_seconds)
                    elif node < boundary and node in self._lent:
                        self._lent.discard(node)
                        self._up(node)
                soonest = min(soonest, DAY / parts - self.now % (DAY / parts))
            first += group.nodes
        self._at(self.now + max(1.0, soonest), TIDE, None)

    def _round(self, _: None) -> None:
        assert self.policy.round_seconds is not None
        for task in self.running:
            self._accrue(task)
        self.policy.round(self)
        self._at(self.now + self.policy.round_seconds, ROUND, None)

    # Helpers of the handlers.

    @property
    def _busy(self) -> int:
        return self.machine.up - self.machine.free

    def _at(self, time: float, kind: int, subject: Any, start: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, kind, subject, start))

    def _wait(self, task: Task) -> None:
        task.waited = self.now
        self.policy.enqueue(task, self)

    def _begin(self, task: Task, placement: Placement, overhead: float) -> None:
        task.placement = placement
        task.gpus = sum(count for _, count in placement)
        task.rate = self.machine.speed(placement) * (task.gpus / task.job.gpus) ** self.model.scaling
        if len(placement) > 1 and self.machine.racks(placement) > 1:
            task.rate *= 1 - self.model.spread_penalty
        task.starts += 1
        task.ready, task.since = self.now + overhead, self.now
        self.totals.overhead += overhead * task.gpus
        task.saved = task.done
        for node, _ in placement:
            self._on_node[node][task] = None
        self.running[task] = None
        self.policy.started(task, self)
        self._at(task.ready + (task.job.seconds - task.done) / task.rate, FINISH, task, task.starts)

    def _accrue(self, task: Task) -> None:
        """Update `done` to the current time."""
        start = max(task.since, task.ready)
        if self.now > start:
            task.done = min(task.job.seconds, task.done + (self.now - start) * task.rate)
        task.since = self.now

    def _end_stretch(self, task: Task, saved: bool) -> None:
        begun = task.saved
        self._accrue(task)
        if not saved:
            step = self._checkpoint * task.rate
            saved_work = min(task.done, begun + (task.done - begun) // step * step)
            self.totals.lost_work += (task.done - saved_work) * task.job.gpus
            task.done = saved_work
        assert task.placement is not None
        self.machine.release(task.placement)
        self._leave_nodes(task)
        del self.running[task]
        task.placement, task.gpus = None, 0
        self.policy.stopped(task, self)

    def _leave_nodes(self, task: Task) -> None:
        for node, _ in task.placement or ():
            self._on_node[node].pop(task, None)

    def _down(self, node: int, notice: float) -> None:
        if not self._reasons_down[node]:
            for task in list(self._on_node[node]):
                self.evict(task, notice)
            self.machine.take_down(node)
        self._reasons_down[node] += 1

    def _up(self, node: int) -> None:
        self._reasons_down[node] -= 1
        if not self._reasons_down[node]:
            self.machine.bring_up(node)

    def _victim_node(self, pool: int) -> tuple[NodeGroup, int]:
        first = sum(earlier.group.nodes for earlier in self.machine.pools[:pool])
        group = self.machine.pools[pool].group
        return group, first + int(self._random.integers(group.nodes))

    def _next_disturbance(self, kind: int, index: int) -> None:
        """Schedule the next failure or reclaim of any node in a group: a Poisson process over all of them."""
        group = self.machine.pools[index].group
        hours = group.mtbf_hours if kind == FAIL else group.reclaim_hours
        if hours:
            self._at(self.now + self._random.exponential(hours * HOUR / group.nodes), kind, index)


def simulate(model: ClusterModel, jobs: Sequence[Job], policy: Policy, seed: int = 0) -> Outcome:
    """Run `jobs` on a cluster under a policy until the last one ends. The same arguments give the same outcome.

    Raises ValueError for jobs that can never fit.
    """
    return Simulation(model, jobs, policy, seed).run()


def _merged(placement: Placement, extra: Placement) -> Placement:
    counts = dict(placement)
    for node, count in extra:
        counts[node] = counts.get(node, 0) + count
    return list(counts.items())


def _shrink(placement: Placement, gpus: int) -> Placement:
    """Remove `gpus` accelerators from the end of a placement, in place. Returns them."""
    smaller: Placement = []
    while gpus:
        node, count = placement.pop()
        if count > gpus:
            placement.append((node, count - gpus))
            count = gpus
        smaller.append((node, count))
        gpus -= count
    return smaller
