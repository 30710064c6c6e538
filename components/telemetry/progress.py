"""How far a step is: a bar where somebody watches, a line every few seconds where a log is kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from holdfast.components.runtime.argv import report_progress
from holdfast.components.runtime.logs import log

Progress = Callable[[str, int, int], None]  # phase, done, total, in whatever the phase counts

LOG_SECONDS = 5.0


class ConsoleProgress:
    """Shows progress on standard error. Use as a context manager."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bar: Any = None
        self._phase = ""
        self._said = clock()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` is done."""
        report_progress(done, total)
        if sys.stderr.isatty():
            self._show(phase, done, total)
        elif self._clock() - self._said >= LOG_SECONDS:
            self._said = self._clock()
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
