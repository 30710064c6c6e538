"""Events for what a launcher waits for, recorded only when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.telemetry import emit
from holdfast.telemetry.events import LaunchPending

log = logging.getLogger("holdfast.launch")

AGAIN_SECONDS = 60.0  # between two records of a reason that alternates with others


class WaitReport:
    """Recorder of reasons to wait. A reason that alternates with others is recorded once a minute, with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current = ""
        self._recorded: dict[str, tuple[float, int]] = {}  # its time, and how often the reason came back since

    def record(self, reason: str) -> None:
        """Record that the launcher now waits for this."""
        if reason == self._current:
            return
        self._current, now = reason, self._clock()
        self._recorded = {each: (at, n) for each, (at, n) in self._recorded.items() if n or now - at < AGAIN_SECONDS}
        at, count = self._recorded.get(reason, (now - AGAIN_SECONDS, 0))
        if now - at < AGAIN_SECONDS:
            self._recorded[reason] = (at, count + 1)
            return
        self._recorded[reason] = (now, 0)
        log.warning("waiting: %s", reason)
        emit(LaunchPending(reason=reason, count=count + 1))

    def end(self) -> None:
        """Note that the launcher no longer waits: the next reason is recorded immediately."""
        self._current = ""
        self._recorded.clear()
