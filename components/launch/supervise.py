"""Restarting a gang: a retryable ending starts the next launch, within a budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.components.launch.interface import Ending, Job, Launcher
from holdfast.components.spec.cluster import Restarts
from holdfast.components.spec.errors import ClusterUnreachableError, ExitCode, StoreUnreachableError
from holdfast.components.telemetry import emit
from holdfast.components.telemetry.events import LaunchEnded

log = logging.getLogger("holdfast.launch")

LONGEST_BACKOFF = 60.0
PATIENCE = 900.0  # seconds that the store or the cluster may be away between two launches
AWAY = (StoreUnreachableError, ClusterUnreachableError)
NOT_HERE = (ExitCode.UNSCHEDULABLE, ExitCode.NO_SPACE)  # retryable, but not by starting at once again


def supervise(
    launcher: Launcher,
    next_job: Callable[[], Job],
    restarts: Restarts,
    stopping: threading.Event,
    on_ending: Callable[[Job, Ending], None] = lambda job, ending: None,  # noqa: ARG005
    clock: Callable[[], float] = time.monotonic,
) -> Ending:
    """Launch until the gang ends well or for good. `next_job` records a launch, or finds one to take over, and
    describes it; `on_ending` sees how each ended.

    A store or a cluster that is away between two launches is waited for, PATIENCE at most; endings are kept meanwhile.
    What the cluster had no place for, or what filled a disk, is not started again here: the first would only give up
    its place in the queue, and the second needs somebody to make room.
    The first restart comes at once, later ones in a row after a wait that doubles. The ending of the last launch is
    returned: a retryable one when the budget (`restarts.budget` within `restarts.window_minutes`) is used up, or when
    `stopping` was set.
    """
    recent: deque[float] = deque()
    untold: deque[tuple[Job, Ending]] = deque()

    def tell() -> None:
        while untold:
            on_ending(*untold[0])
            untold.popleft()

    def prepare() -> Job:
        tell()
        return next_job()

    while True:
        job = _patiently(prepare, stopping, clock)
        ending = launcher.run(job)
        untold.append((job, ending))
        try:
            tell()
        except AWAY as error:
            log.warning("how launch %d ended is written down when the store is back: %s", job.launch, error)
        wait = None
        if ending.retryable and ending.code not in NOT_HERE and not stopping.is_set():
            wait = _pause(recent, restarts, clock())
            if wait is None:
                log.error(
                    "the budget of %d restarts in %g minutes is used up", restarts.budget, restarts.window_minutes
                )
        ended = LaunchEnded(launch=job.launch, code=ending.code, detail=ending.detail, restart_in=wait)
        log.log(logging.INFO if ending.code == ExitCode.OK else logging.WARNING, "%s", ended.text)
        emit(ended)
        if wait is None or stopping.wait(wait):
            return ending


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
                raise
        pause = min(LONGEST_BACKOFF, 2 * pause)
