"""Progress of a step: events, and a bar on a terminal or a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from holdfast.runtime.logs import log
from holdfast.telemetry.channel import emit, show_in_argo
from holdfast.telemetry.events import PhaseProgress

Progress = Callable[[str, int, int], None]  # phase, done, total, in the unit of the phase

LOG_SECONDS = 5.0
EVENT_SECONDS = 0.5  # interval between two events of a phase, except its first and its last


class ConsoleProgress:
    """Emits progress, and shows it on standard error. Use as a context manager."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, whole_step: bool = True) -> None:
        """`whole_step`: the progress is that of the whole step. False for a part of it, when other code reports to
        Argo."""
        self._clock = clock
        self._whole_step = whole_step
        self._bar: Any = None
        self._phase = ""
        self._logged_at = clock()
        self._last_event: tuple[str, float] = ("", 0.0)  # phase and time of the last event

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` is done."""
        last_phase, last_time = self._last_event
        if phase != last_phase or done >= total or self._clock() - last_time >= EVENT_SECONDS:
            self._last_event = (phase, self._clock())
            event = PhaseProgress(phase=phase, done=done, total=total)
            emit(event)
            if self._whole_step:
                show_in_argo(event)
        if sys.stderr.isatty():
            self._show(phase, done, total)
        elif self._clock() - self._logged_at >= LOG_SECONDS:
            self._logged_at = self._clock()
            log.info("%s: %d%%", phase, 100 * done // max(1, total))

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self, phase: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if phase != self._phase:
            if self._bar is not None:
                self._bar.close()
            self._bar = tqdm(desc=phase, total=total, unit="", unit_scale=True, file=sys.stderr)
            self._phase = phase
        self._bar.total = total
        self._bar.update(done - self._bar.n)
