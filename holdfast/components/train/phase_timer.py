"""Time that a rank spends in each phase, reported as events every few seconds.

The goodput ledger (`telemetry/ledger.py`) is made of them. Promises that every moment of the process is told once; that
nothing waits for a device but for steps that lie behind it; and that what a killed rank leaves untold is a minute at
most in a gang of up to a hundred.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

from holdfast.components.train.energy_meter import Meter
from holdfast.components.train.observers import FinishedStep
from holdfast.spec.errors import PreemptedError
from holdfast.telemetry import emit, phases
from holdfast.telemetry.events import TimeSpent
from holdfast.telemetry.phases import Lap

SECONDS = 5.0  # between two events of a rank that has just begun...
SHARE, MOST_SECONDS = 0.1, 60.0  # ...and later this share of the time that it has been there, up to so many
RANKS_A_SECOND = 2  # of a large gang tell in a second


class PhaseTimeReporter:
    """An observer that tells how this rank spends its time; as a context manager, the rest when the rank ends."""

    def __init__(self, rank: int, world: int, step: int, device: torch.device, meter: Meter) -> None:
        """Tells at once what the process did before `step`, its first one, began. From here on an accelerator's time is
        its own, and `meter` tells of it."""
        if device.type == "cuda":
            phases.measure_by(_mark)
        self._rank, self._step = rank, step
        self._least, self._began = max(SECONDS, world / RANKS_A_SECOND), time.monotonic()
        self._meter, self._metered = meter, False
        self._laps: list[Lap] = [phases.lap()]
        self._last_report = 0.0
        self._tell()

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer."""
        now = time.monotonic()
        if now - self._last_report >= max(self._least, min(MOST_SECONDS, SHARE * (now - self._began))):
            self._tell()  # without this step, behind which a device may not be
        self._laps.append(finished.lap)
        self._step = finished.step

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._laps.append(phases.lap())
        self._tell(last=True, failed=error is not None and not isinstance(error, PreemptedError))

    def _tell(self, *, last: bool = False, failed: bool = False) -> None:
        spent: Counter[str] = Counter()
        for lap in self._laps:
            # After a failure a device may stand for ever in a collective whose peers are gone: it is not waited for.
            spent.update(lap.host if failed else lap.seconds)
        self._laps, self._last_report = [], time.monotonic()
        told = {name: round(value, 6) for name, value in spent.items() if value > 0}
        read = self._meter.read().model_dump(exclude_none=True)
        if not self._metered:
            read.pop("joules", None)  # what comes before the first is longer than the meter is
        event = TimeSpent(
            rank=self._rank,
            step=self._step,
            seconds=told,
            peak_memory=peak_memory(),
            last=last,
            failed=failed,
            **read,
        )
        self._metered = True
        emit(event)


def _mark() -> phases.Stamp:
    """A mark in what the accelerator does, which waits for nothing."""
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peak_memory() -> int:
    """The most bytes that this rank has held: of its accelerator, or without one of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
