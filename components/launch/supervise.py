"""Restarting a gang: a retryable ending starts the next launch, within a budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from holdfast.components.launch.interface import Ending, Job, Launcher
from holdfast.components.spec.cluster import Restarts
from holdfast.components.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")

LONGEST_BACKOFF = 60.0
NOT_HERE = (ExitCode.UNSCHEDULABLE, ExitCode.NO_SPACE)  # retryable, but not by starting at once again


def supervise(
    launcher: Launcher,
    next_job: Callable[[], Job],
    restarts: Restarts,
    stopping: threading.Event,
    on_line: Callable[[str], None],
    on_ending: Callable[[Job, Ending], None] = lambda job, ending: None,  # noqa: ARG005
    clock: Callable[[], float] = time.monotonic,
) -> Ending:
    """Launch until the gang ends well or for good. `next_job` records a launch, or finds one to take over, and
    describes it; `on_ending` sees how each ended.

    What the cluster had no place for, or what filled a disk, is not started again here: the first would only give up
    its place in the queue, and the second needs somebody to make room.
    The first restart comes at once, later ones in a row after a wait that doubles. The ending of the last launch is
    returned: a retryable one when the budget (`restarts.budget` within `restarts.window_minutes`) is used up, or when
    `stopping` was set.
    """
    recent: deque[float] = deque()
    while True:
        job = next_job()
        ending = launcher.run(job, on_line)
        on_ending(job, ending)
        if not ending.retryable or ending.code in NOT_HERE or stopping.is_set():
            return ending
        now = clock()
        while recent and now - recent[0] > restarts.window_minutes * 60:
            recent.popleft()
        if len(recent) >= restarts.budget:
            log.error(
                "launch %d ended (%s), and the budget of %d restarts in %g minutes is used up",
                job.launch, ending.reason, restarts.budget, restarts.window_minutes,
            )  # fmt: skip
            return ending
        wait = min(LONGEST_BACKOFF, restarts.backoff_seconds * 2 ** (len(recent) - 1)) if recent else 0.0
        recent.append(now)
        log.warning(
            "launch %d ended (%s); starting the next in %.0f s%s",
            job.launch, ending.reason, wait, f". {ending.detail}" if ending.detail else "",
        )  # fmt: skip
        if stopping.wait(wait):
            return ending
