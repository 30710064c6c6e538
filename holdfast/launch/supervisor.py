"""Supervisor of a gang: restarts it after a retryable ending, within a budget."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from holdfast.launch.interface import GangExit, Job, Launcher, log_command
from holdfast.spec.cluster import Restarts
from holdfast.spec.errors import ClusterUnreachableError, ExitCode, StoreUnreachableError, TerminatedError
from holdfast.telemetry import emit
from holdfast.telemetry.events import LaunchEnded

log = logging.getLogger("holdfast.launch")

LONGEST_BACKOFF = 60.0
RECLAIM_BACKOFF = 15.0  # times the consecutive launches that a notice ended before a save: meanwhile the machine goes
PATIENCE = 900.0  # seconds that the store or the cluster may be unavailable between two launches
AWAY = (StoreUnreachableError, ClusterUnreachableError)
NOT_HERE = (ExitCode.UNSCHEDULABLE, ExitCode.NO_SPACE)  # retryable, but not by an immediate restart


def _ignore(_job: Job, _exit: GangExit) -> None:
    """Receive an ending that nothing else records."""


def _never(_job: Job) -> bool:
    """The answer where no cloud reclaims nodes."""
    return False


@dataclass
class Supervisor:
    """Launches a gang until it succeeds or no restart is possible.

    - `next_job` records a launch, or finds one to take over, and describes it.
    - `on_gang_exit` receives each ending.
    - `saved_step` returns the newest step that a gang can resume from.
    - `reclaimed` returns whether a cloud ended the job by reclaiming one of its nodes.

    If the store or the cluster is unavailable between two launches, the supervisor waits at most PATIENCE seconds and
    keeps the endings meanwhile. The first restart within the budget's window is immediate. Each further one waits twice
    as long, at most LONGEST_BACKOFF seconds. A launch that a cloud ended does not count as a restart, and restarts
    immediately if it had saved anything.

    A retryable ending is not restarted, but returned, in these cases:

    - It is UNSCHEDULABLE: a restart would only give up its place in the queue.
    - It is NO_SPACE: a person must free space.
    - It is UNHEALTHY_NODE, and the launcher cannot choose other nodes.
    - The budget is used up (`restarts.budget` within `restarts.window_minutes`).
    - `restarts.max_stalled_launches` consecutive launches saved no new step, however long they took.
    - `stopping` was set.

    Raises TerminatedError if `stopping` is set while the store or the cluster is unavailable.
    """

    launcher: Launcher
    next_job: Callable[[], Job]
    restarts: Restarts
    stopping: threading.Event
    on_gang_exit: Callable[[Job, GangExit], None] = _ignore
    saved_step: Callable[[], int] = lambda: 0
    clock: Callable[[], float] = time.monotonic
    reclaimed: Callable[[Job], bool] = _never

    def __post_init__(self) -> None:
        self._recent: deque[float] = deque()  # times of the restarts that count
        self._progress = _Progress(self.saved_step, self.restarts.max_stalled_launches)
        self._unrecorded: deque[tuple[Job, GangExit]] = deque()

    def run(self) -> GangExit:
        """Supervise the gang to its end. Returns the ending of the last launch."""
        while True:
            job = _patiently(self._prepare, self.stopping, self.clock)
            ending = self.launcher.run(job)
            if ending.code != ExitCode.OK:
                detail = "; ".join(filter(None, (ending.detail, log_command(job, ending))))
                ending = replace(ending, detail=detail)
            self._unrecorded.append((job, ending))
            try:
                self._record()
            except AWAY as error:
                log.warning("how launch %d ended is written down when the store is back: %s", job.launch, error)
            ending, wait = self._decide(job, ending)
            event = LaunchEnded(launch=job.launch, code=ending.code, detail=ending.detail, restart_in=wait)
            log.log(logging.INFO if ending.code == ExitCode.OK else logging.WARNING, "%s", event.text)
            emit(event)
            if wait is None or self.stopping.wait(wait):
                return ending

    def _record(self) -> None:
        """Pass the endings on that are not recorded yet. Raises the errors of the store."""
        while self._unrecorded:
            self.on_gang_exit(*self._unrecorded[0])
            self._unrecorded.popleft()

    def _prepare(self) -> Job:
        self._record()
        self._progress.begin()
        return self.next_job()

    def _decide(self, job: Job, ending: GangExit) -> tuple[GangExit, float | None]:
        """The ending, with the reason if the run is given up, and the seconds until the next launch; None for none."""
        is_unhealthy = ending.code == ExitCode.UNHEALTHY_NODE and not ending.elsewhere
        if not ending.retryable or ending.code in NOT_HERE or is_unhealthy or self.stopping.is_set():
            return ending, None
        restarts = self.restarts
        missing = self._progress.is_missing()
        backoff = RECLAIM_BACKOFF * self._progress.fruitless
        wait = backoff if _is_known(self.reclaimed, job) else _pause(self._recent, restarts, self.clock())
        if missing:
            reason = f"{restarts.max_stalled_launches} launches in a row ended without a new checkpoint"
            log.error("%s: the run is given up, see cluster.restarts.max_stalled_launches", reason)
            return replace(ending, detail=f"{reason}, the last one so: {ending.detail}"), None
        if wait is None:
            log.error("the budget of %d restarts in %g minutes is used up", restarts.budget, restarts.window_minutes)
        return ending, wait


def _is_known(reclaimed: Callable[[Job], bool], job: Job) -> bool:
    """Whether the job was reclaimed. False while the store is unavailable."""
    with suppress(*AWAY):
        return reclaimed(job)
    return False


class _Progress:
    """Counter of consecutive launches that saved nothing new."""

    def __init__(self, saved_step: Callable[[], int], most: int) -> None:
        self._saved_step, self._most = saved_step, most
        self._best: int | None = None
        self.fruitless = 0

    def begin(self) -> None:
        """Note that a launch is about to start. Raises the errors of the store."""
        if self._best is None:
            self._best = self._saved_step()

    def is_missing(self) -> bool:
        """Whether the launch that has just ended exceeds the limit. An unavailable store shows no progress."""
        assert self._best is not None, "it has begun"
        step = self._best
        with suppress(*AWAY):
            step = max(step, self._saved_step())
        self.fruitless = 0 if step > self._best else self.fruitless + 1
        self._best = step
        return self.fruitless >= self._most


def _pause(recent: deque[float], restarts: Restarts, now: float) -> float | None:
    """Seconds until the next launch; None when the budget is used up. `recent` holds the times of the restarts that
    count."""
    while recent and now - recent[0] > restarts.window_minutes * 60:
        recent.popleft()
    if len(recent) >= restarts.budget:
        return None
    wait = min(LONGEST_BACKOFF, restarts.backoff_seconds * 2 ** (len(recent) - 1)) if recent else 0.0
    recent.append(now)
    return wait


def _patiently(prepare: Callable[[], Job], stopping: threading.Event, clock: Callable[[], float]) -> Job:
    """The result of `prepare`. Retries for at most PATIENCE seconds while the store or the cluster is unavailable, then
    raises its error. Raises TerminatedError if `stopping` is set meanwhile."""
    start, pause = clock(), 1.0
    while True:
        try:
            return prepare()
        except AWAY as error:
            if clock() - start + pause > PATIENCE:
                raise
            log.warning("the next launch waits %.0f s and tries again: %s", pause, error)
            if stopping.wait(pause):
                raise TerminatedError(f"stopped while the next launch waited, because {error}") from error
        pause = min(LONGEST_BACKOFF, 2 * pause)
