"""Phase timer: reports the time that a rank spends in each phase as events every few seconds.

The goodput ledger (`telemetry/ledger.py`) is computed from them. Every moment of the process is reported once. Nothing
waits for a device except for steps that are finished. A killed rank leaves at most a minute unreported in a gang of up
to a hundred ranks.

Phases are also ranges of a profiler: of torch's in a trace, and of NVTX for Nsight Systems. A range has the name of its
phase after `holdfast.`. No range begins unless a profiler is requested.
"""

import logging
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from holdfast.rank.measure.energy_meter import Meter
from holdfast.spec.errors import PreemptedError
from holdfast.telemetry import emit, phases
from holdfast.telemetry.events import TimeSpent
from holdfast.telemetry.phases import Lap, Phase, RangeMarker

SECONDS = 5.0  # between two events of a new rank...
SHARE, MOST_SECONDS = 0.1, 60.0  # ...and later this share of the rank's age, up to this limit
RANKS_A_SECOND = 2  # of a large gang that report per second
PREFIX = "holdfast."
NVTX_VARIABLE = "HOLDFAST_NVTX"  # 1: the phases of a rank with an NVIDIA GPU are NVTX ranges
log = logging.getLogger("holdfast.train")


class TimedStep(Protocol):
    """A finished step, as far as this observer needs it."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def lap(self) -> Lap:
        """The time since the previous step finished."""


class PhaseTimeReporter:
    """An observer that reports how this rank spends its time. As a context manager it reports the rest when the rank
    ends."""

    def __init__(self, rank: int, world: int, step: int, device: torch.device, meter: Meter) -> None:
        """Immediately reports the time before the process's first step, which follows `step`. From here on it
        measures the time of an accelerator separately, and `meter` reports its figures."""
        if device.type == "cuda":
            phases.measure_by(_mark)
        if (ranges := requested_ranges(device)) is not None:
            phases.mark_ranges(ranges)
        self._rank, self._step = rank, step
        self._least, self._began = max(SECONDS, world / RANKS_A_SECOND), time.monotonic()
        self._meter, self._metered = meter, False
        self._laps: list[Lap] = [phases.lap()]
        self._last_report = 0.0
        self._tell()

    def on_step(self, finished: TimedStep) -> None:
        """See Observer."""
        now = time.monotonic()
        if now - self._last_report >= max(self._least, min(MOST_SECONDS, SHARE * (now - self._began))):
            self._tell()  # without this step, which the device may not have finished
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
        totals: Counter[str] = Counter()
        for lap in self._laps:
            # After a failure a device may block forever in a collective with lost peers, so it is not waited for.
            totals.update(lap.host if failed else lap.seconds)
        self._laps, self._last_report = [], time.monotonic()
        seconds = {name: round(value, 6) for name, value in totals.items() if value > 0}
        read = self._meter.read().model_dump(exclude_none=True)
        if not self._metered:
            read.pop("joules", None)  # time before the first report is longer than the meter's measurement
        event = TimeSpent(
            rank=self._rank,
            step=self._step,
            seconds=seconds,
            peak_memory=peak_memory(),
            last=last,
            failed=failed,
            **read,
        )
        self._metered = True
        emit(event)


def _mark() -> phases.Stamp:
    """A timing mark on the accelerator that waits for nothing."""
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peak_memory() -> int:
    """Peak memory of this rank in bytes: of its accelerator, or else of the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trace_ranges() -> RangeMarker:
    """Ranges in a trace of torch's profiler. A range belongs to a thread, so phases that begin in another thread than
    that of this call are part of the range before them."""
    thread, current = threading.get_ident(), None

    def mark(phase: Phase | None) -> None:
        nonlocal current
        if threading.get_ident() != thread:
            return
        if current is not None:
            current.__exit__(None, None, None)
        current = None if phase is None else torch.profiler.record_function(PREFIX + phase)
        if current is not None:
            current.__enter__()

    return mark


def nvtx_ranges() -> RangeMarker:
    """NVTX ranges of the process. Any thread may end one."""
    current = None

    def mark(phase: Phase | None) -> None:
        nonlocal current
        if current is not None:
            torch.cuda.nvtx.range_end(current)
        current = None if phase is None else torch.cuda.nvtx.range_start(PREFIX + phase)

    return mark


def requested_ranges(device: torch.device) -> RangeMarker | None:
    """NVTX ranges if HOLDFAST_NVTX is 1 and this torch is built for NVIDIA GPUs, else None."""
    if os.environ.get(NVTX_VARIABLE, "") in ("", "0"):
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        log.warning("%s is set, and NVTX ranges need an NVIDIA GPU; there are none", NVTX_VARIABLE)
        return None
    return nvtx_ranges()
