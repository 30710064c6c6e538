"""What a launcher waits for, as events: recorded when it changes, and not every time that it is seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.telemetry import emit
from holdfast.telemetry.events import LaunchPending

log = logging.getLogger("holdfast.launch")

AGAIN_SECONDS = 60.0  # between two records of one reason that comes and goes


class WaitReport:
    """Records reasons to wait. A reason that alternates with others is recorded once a minute, with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current = ""
        self._recorded: dict[str, tuple[float, int]] = {}  # when, and how often it came back since

    def record(self, reason: str) -> None:
        """The launcher waits for this now."""
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
        """The launcher waits no more: what it waits for next is recorded immediately."""
        self._current = ""
        self._recorded.clear()
