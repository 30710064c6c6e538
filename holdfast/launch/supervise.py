"""Restarting a gang: a retryable ending starts the next launch, within a budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from holdfast.launch.interface import Ending, Job, Launcher, where_the_log_is
from holdfast.spec.cluster import Restarts
from holdfast.spec.errors import ClusterUnreachableError, ExitCode, StoreUnreachableError, TerminatedError
from holdfast.telemetry import emit
from holdfast.telemetry.events import LaunchEnded

log = logging.getLogger("holdfast.launch")

LONGEST_BACKOFF = 60.0
RECLAIM_BACKOFF = 15.0  # times the launches in a row that a notice ended before they saved: its machine goes meanwhile
PATIENCE = 900.0  # seconds that the store or the cluster may be away between two launches
AWAY = (StoreUnreachableError, ClusterUnreachableError)
NOT_HERE = (ExitCode.UNSCHEDULABLE, ExitCode.NO_SPACE)  # retryable, but not by starting at once again


def supervise(
    launcher: Launcher,
    next_job: Callable[[], Job],
    restarts: Restarts,
    stopping: threading.Event,
    on_ending: Callable[[Job, Ending], None] = lambda job, ending: None,  # noqa: ARG005
    saved_step: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    reclaimed: Callable[[Job], bool] = lambda job: False,  # noqa: ARG005
) -> Ending:
    """Launch until the gang ends well or for good. `next_job` records a launch, or finds one to take over, and
    describes it; `on_ending` sees how each ended; `saved_step` is the newest step that a gang can go on from;
    `reclaimed` says whether a cloud took a node of the job back, and ended it so.

    A store or a cluster that is away between two launches is waited for, PATIENCE at most; endings are kept meanwhile.
    What the cluster had no place for, or what filled a disk, is not started again here: the first would only give up
    its place in the queue, and the second needs somebody to make room. Nor is what would be again on a node that failed
    its health check.
    The first restart comes at once, later ones in a row after a wait that doubles; what a cloud ended counts as
    none, and is started again at once if it had saved anything. The ending of the last launch is
    returned: a retryable one when the budget (`restarts.budget` within `restarts.window_minutes`) is used up, when
    `restarts.max_stalled_launches` launches in a row have ended without a new step that was saved, however long each
    took, or when `stopping` was set. Raises TerminatedError when it is set while the store or the cluster is away.
    """
    recent: deque[float] = deque()
    progress = _Progress(saved_step, restarts.max_stalled_launches)
    untold: deque[tuple[Job, Ending]] = deque()

    def tell() -> None:
        while untold:
            on_ending(*untold[0])
            untold.popleft()

    def prepare() -> Job:
        tell()
        progress.begin()
        return next_job()

    while True:
        job = _patiently(prepare, stopping, clock)
        ending = launcher.run(job)
        if ending.code != ExitCode.OK:
            detail = "; ".join(filter(None, (ending.detail, where_the_log_is(job, ending))))
            ending = replace(ending, detail=detail)
        untold.append((job, ending))
        try:
            tell()
        except AWAY as error:
            log.warning("how launch %d ended is written down when the store is back: %s", job.launch, error)
        wait = None
        refused = ending.code == ExitCode.UNHEALTHY_NODE and not ending.elsewhere
        if ending.retryable and ending.code not in NOT_HERE and not refused and not stopping.is_set():
            missing = progress.is_missing()
            again = RECLAIM_BACKOFF * progress.fruitless
            wait = again if _is_known(reclaimed, job) else _pause(recent, restarts, clock())
            if missing:
                wait, told = None, f"{restarts.max_stalled_launches} launches in a row ended without a new checkpoint"
                ending = replace(ending, detail=f"{told}, the last one so: {ending.detail}")
                log.error("%s: the run is given up, see cluster.restarts.max_stalled_launches", told)
            elif wait is None:
                log.error(
                    "the budget of %d restarts in %g minutes is used up", restarts.budget, restarts.window_minutes
                )
        ended = LaunchEnded(launch=job.launch, code=ending.code, detail=ending.detail, restart_in=wait)
        log.log(logging.INFO if ending.code == ExitCode.OK else logging.WARNING, "%s", ended.text)
        emit(ended)
        if wait is None or stopping.wait(wait):
            return ending


def _is_known(reclaimed: Callable[[Job], bool], job: Job) -> bool:
    """Whether the job was reclaimed, as far as the store says now."""
    with suppress(*AWAY):
        return reclaimed(job)
    return False


class _Progress:
    """Counts launches in a row after which nothing more was saved than before them."""

    def __init__(self, saved_step: Callable[[], int], most: int) -> None:
        self._saved_step, self._most = saved_step, most
        self._best: int | None = None
        self.fruitless = 0

    def begin(self) -> None:
        """A launch is about to start. Raises what the store does."""
        if self._best is None:
            self._best = self._saved_step()

    def is_missing(self) -> bool:
        """Whether the launch that has just ended was one too many. A store that is away shows no progress."""
        assert self._best is not None, "it has begun"
        step = self._best
        with suppress(*AWAY):
            step = max(step, self._saved_step())
        self.fruitless = 0 if step > self._best else self.fruitless + 1
        self._best = step
        return self.fruitless >= self._most


def _pause(recent: deque[float], restarts: Restarts, now: float) -> float | None:
    """Seconds until the next launch; None when the budget is used up. `recent`: when the restarts were that count."""
    while recent and now - recent[0] > restarts.window_minutes * 60:
        recent.popleft()
    if len(recent) >= restarts.budget:
        return None
    wait = min(LONGEST_BACKOFF, restarts.backoff_seconds * 2 ** (len(recent) - 1)) if recent else 0.0
    recent.append(now)
    return wait


def _patiently(prepare: Callable[[], Job], stopping: threading.Event, clock: Callable[[], float]) -> Job:
    """What `prepare` returns, once what it needs is there."""
    begun, pause = clock(), 1.0
    while True:
        try:
            return prepare()
        except AWAY as error:
            if clock() - begun + pause > PATIENCE:
                raise
            log.warning("the next launch waits %.0f s and tries again: %s", pause, error)
            if stopping.wait(pause):
                raise TerminatedError(f"stopped while the next launch waited, because {error}") from error
        pause = min(LONGEST_BACKOFF, 2 * pause)
