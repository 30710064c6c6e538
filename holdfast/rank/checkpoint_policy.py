"""Checkpoint policy: saves by steps, by minutes, or at the interval with the lowest expected loss.

Every rank counts the same steps, and only rank 0's clock counts. Its decision goes to all ranks asynchronously after
each step and is read after the next one. So no step waits, and every rank saves after the same step. The time of a save
changes no bit of the state.

`auto` saves at the interval with the lowest expected loss (`planning.failures`).
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from holdfast.checkpoint import Attempt, list_attempts
from holdfast.checkpoint.local_tiers.tier_set import TierSet
from holdfast.collectives import Gang, PendingFlag
from holdfast.launch.launches import RECENT_LAUNCHES, read_exits
from holdfast.planning.run_estimate import RANK_SECONDS_PER_FAILURE, best_interval
from holdfast.spec.checkpoint import Checkpoint
from holdfast.spec.errors import ExitCode
from holdfast.store import Store

log = logging.getLogger("holdfast.train")

FIRST_SECONDS = 60.0  # until the first save shows its cost
REMEMBERED = 5  # saves whose cost counts
_LOSES_NOTHING = (ExitCode.OK, ExitCode.PREEMPTED)


@dataclass(frozen=True)
class Failures:
    """The failures of a run before this attempt, as a basis for the expected time to the next one."""

    count: int = 0
    seconds: float = 0.0  # duration of the earlier attempts together
    ranks: int = 1

    def mean_seconds(self, elapsed: float) -> float:
        """The expected time to the next failure, in seconds, `elapsed` seconds into this attempt. It combines
        observed failures with the known rate of such machines, which counts as one more failure."""
        return (RANK_SECONDS_PER_FAILURE / self.ranks + self.seconds + elapsed) / (1 + self.count)


def failures_before(store: Store, attempt: Attempt, ranks: int) -> Failures:
    """The failures of the newest attempts before this one. An attempt whose launch ended successfully, or with a
    checkpoint, had none."""
    began = dict(list_attempts(store, attempt.run_id, after=max(0, attempt.number - RECENT_LAUNCHES - 1)))
    well = sum(ending.code in _LOSES_NOTHING for ending in read_exits(store, attempt.run_id).values())
    before = [moment for number, moment in began.items() if number < attempt.number]
    seconds = began[attempt.number] - min(before) if before and attempt.number in began else 0.0
    return Failures(max(0, len(before) - well), max(0.0, seconds), ranks)


def upload_rate(settings: Checkpoint) -> float | None:
    """This rank's share of the checkpoint upload rate of its host, in bytes per second. None means unlimited."""
    rate = settings.upload_mib_per_second
    return None if rate is None else rate * 2**20 / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def near_tiers(store: Store, attempt: Attempt, gang: Gang, settings: Checkpoint) -> TierSet | None:
    """The local checkpoint tiers of this gang, or None if the spec has none. A collective call."""
    memory, disk = settings.memory, settings.disk
    intervals = {"memory": memory.every_steps, "disk": disk.every_steps}
    due = {name: steps for name, steps in intervals.items() if steps is not None}
    return TierSet(store, attempt, gang, due, disk.path, memory.peers) if due else None


class CheckpointPolicy:
    """Decides after each step whether to save, alike on every rank."""

    def __init__(
        self,
        settings: Checkpoint,
        *,
        start: int,
        steps: int,
        gang: Gang,
        failures: Failures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Covers the steps from `start` to `steps`. Only rank 0 needs the run's `failures`, and only its `clock`
        counts."""
        self._settings, self._steps, self._gang, self._clock = settings, steps, gang, clock
        self._failures = failures or Failures(ranks=gang.size)
        self._timed = settings.every == "auto" or settings.every_minutes is not None
        self._last = start  # the step saved last
        self._pending: PendingFlag | None = None
        self._began = self._saved_at = self._mark = clock()
        self._durations: list[float] = []  # of the steps since the last save, in seconds
        self._stall: float | None = None  # seconds for which the last save blocked the loop
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._logged_interval = 0.0

    def due(self, done: int) -> bool:
        """Whether the state after step `done` is saved. Call it once per step. A collective call if time counts."""
        agreed = self._pending.result() if self._pending is not None else False
        self._pending = None
        due = agreed or done == self._steps or self._by_steps(done)
        if self._timed:
            now = self._clock()
            self._durations.append(now - self._mark)
            self._mark = now
            if not due:
                self._pending = self._gang.any_later(self._gang.rank == 0 and self._time_has_come(now))
        if due:
            self._last = done
        return due

    def saved(self) -> None:
        """Record that the checkpointer took the due save over, and training continues."""
        now = self._clock()
        if self._stall is not None and self._durations:  # total cost of the save before: its stall, and slower steps
            usual = median(self._durations) * len(self._durations)
            self._costs.append(self._stall + max(0.0, sum(self._durations) - usual))
        self._stall = now - self._mark
        self._durations, self._saved_at, self._mark = [], now, now

    def interval(self) -> float:
        """The seconds from one save to the next, as far as time decides. Infinite if it does not."""
        limit = math.inf if self._settings.every_minutes is None else self._settings.every_minutes * 60
        if self._settings.every != "auto":
            return limit
        if self._stall is None:
            return min(FIRST_SECONDS, limit)
        cost = median(self._costs or [self._stall])
        mean = self._failures.mean_seconds(self._clock() - self._began)
        best = best_interval(cost, mean)
        self._tell(best, cost, mean)
        return min(best, limit)

    def _by_steps(self, done: int) -> bool:
        if self._settings.every == "auto":
            return done - self._last >= self._settings.every_steps
        return done % self._settings.every_steps == 0

    def _time_has_come(self, now: float) -> bool:
        """Whether the next step, after which this result is read, is the last one within the interval."""
        return now + median(self._durations) - self._saved_at >= self.interval()

    def _tell(self, best: float, cost: float, mean: float) -> None:
        if not self._logged_interval / 2 < best < self._logged_interval * 2:
            self._logged_interval = best
            log.info(
                "checkpoint.every auto: a save costs %.3f s and a failure is to be expected every %.1f h, so %.0f s "
                "lie between two saves, and at most %d steps",
                cost,
                mean / 3600,
                best,
                self._settings.every_steps,
            )
