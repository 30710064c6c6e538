"""The phases of a rank, and the clock that measures them: one list for all users.

Entering a phase costs about two microseconds, takes no lock and never waits. One thread at a time enters; any thread
may read `place()`. Where a device computes asynchronously, `measure_by` reads the device's clock at the same places,
without waiting for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

import psutil

Phase = Literal[
    "start",  # the process begins: imports, its launch, its dataset
    "meet",  # the ranks find each other, and claim an attempt
    "build",  # the model is made, sharded and compiled; one dry step
    "restore",  # the state is loaded
    "data",  # waits for the next batch
    "generate",  # generates answers and their rewards
    "forward",
    "backward",
    "pipeline",  # forward and backward of a pipeline's stages alternately, and the waits for other stages
    "communication",  # waits for collectives that no computation hides
    "optimizer",  # clips, and updates the weights
    "check",  # compares replicas, computes state digests, reports progress
    "save",  # waits for a save: for its copy, or for a buffer
    "leave",  # the last commit, and the end
    "script",  # a training script runs that has not restored its state, or has no session
]
PHASES: tuple[Phase, ...] = get_args(Phase)
_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}
STEP_PHASES: tuple[Phase, ...] = (
    "data",
    "generate",
    "forward",
    "backward",
    "pipeline",
    "communication",
    "optimizer",
    "check",
    "save",
)


class Place(NamedTuple):
    """The current phase of a process."""

    phase: Phase
    step: int  # optimizer steps done
    since: float  # by `time.monotonic`


class Page(Protocol):
    """Memory that another process reads: see `runtime.heartbeat`."""

    def enter(self, phase: int, step: int, now: float) -> None:
        """Enter the phase of that number in PHASES after `step` optimizer steps; `now` by `time.monotonic`."""


class RangeMarker(Protocol):
    """Shows phases as ranges of a profiler."""

    def __call__(self, phase: Phase | None, /) -> None:
        """End the current range, and begin that of `phase`; None: begin none."""


class Stamp(Protocol):
    """A mark in the work of a device, as `torch.cuda.Event` is."""

    def elapsed_time(self, end_event: Stamp, /) -> float:
        """Milliseconds from this mark to another one. The device must have passed both."""

    def synchronize(self) -> object:
        """Wait until the device is past the mark."""


@dataclass(frozen=True)
class Lap:
    """The time from one lap to the next, by phases."""

    host: Mapping[Phase, float]  # seconds
    stamps: Sequence[tuple[Phase, Stamp]] = field(default=())  # the phase that began at each mark; the last one ends it

    @property
    def seconds(self) -> Mapping[Phase, float]:
        """Seconds by phase, which together are the lap. With a device: its own times. Waits until the device is past
        the end of the lap."""
        if len(self.stamps) < 2:
            return self.host
        self.stamps[-1][1].synchronize()
        totals: dict[Phase, float] = {}
        for (phase, begin), (_, end) in zip(self.stamps, self.stamps[1:], strict=False):
            totals[phase] = totals.get(phase, 0.0) + begin.elapsed_time(end) / 1000
        return totals


class PhaseClock:
    """Adds up how long a process was in each phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, age: float = 0.0) -> None:
        """`age`: seconds that the process already existed."""
        self._clock = clock
        self._mark = clock() - age
        self._seconds: dict[Phase, float] = {}
        self._stamp: Callable[[], Stamp] | None = None
        self._stamps: list[tuple[Phase, Stamp]] = []
        self._held = False
        self._page: Page | None = None
        self._ranges: RangeMarker | None = None
        self.place = Place("start", 0, self._mark)

    def show_on(self, page: Page) -> None:
        """Mark every phase that begins on a page that another process reads."""
        self._page = page
        page.enter(PHASES.index(self.place.phase), self.place.step, self._clock())

    def measure_by(self, stamp: Callable[[], Stamp]) -> None:
        """Let `stamp` mark the work of a device wherever a phase begins, from the next lap on."""
        self._stamp = stamp

    def mark_ranges(self, ranges: RangeMarker | None) -> RangeMarker | None:
        """Show this phase and all that follow as ranges; None: show none. Returns what has shown them until now."""
        before, self._ranges = self._ranges, ranges
        if before is not None:
            before(None)
        if ranges is not None:
            ranges(self.place.phase)
        return before

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase, and end the one before; `step`: optimizer steps done, if that has changed."""
        if self._held:
            return
        now, before = self._clock(), self.place
        self._seconds[before.phase] = self._seconds.get(before.phase, 0.0) + now - self._mark
        self._mark = now
        self.place = Place(phase, before.step if step is None else step, now)
        if self._page is not None:
            self._page.enter(_NUMBERS[phase], self.place.step, now)
        if self._stamps and self._stamp is not None:
            self._stamps.append((phase, self._stamp()))
        if self._ranges is not None and phase != before.phase:
            self._ranges(phase)

    @contextmanager
    def only(self, phase: Phase) -> Iterator[None]:
        """Count the whole context as this phase, regardless of calls of `enter` inside."""
        self.enter(phase)
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def lap(self) -> Lap:
        """The time since the last lap, or since the process began. The phase continues."""
        phase, step, since = self.place
        self.enter(phase)
        self.place = Place(phase, step, since)
        lap = Lap(self._seconds, self._stamps)
        self._seconds = {}
        self._stamps = [] if self._stamp is None else self._stamps[-1:] or [(phase, self._stamp())]
        return lap


def enter(phase: Phase, step: int | None = None) -> None:
    """See PhaseClock: of this process."""
    _here.enter(phase, step)


def only(phase: Phase) -> AbstractContextManager[None]:
    """See PhaseClock: of this process."""
    return _here.only(phase)


def lap() -> Lap:
    """See PhaseClock: of this process."""
    return _here.lap()


def place() -> Place:
    """The current phase of this process. Thread-safe."""
    return _here.place


def show_on(page: Page) -> None:
    """See PhaseClock: of this process."""
    _here.show_on(page)


def measure_by(stamp: Callable[[], Stamp]) -> None:
    """See PhaseClock: of this process."""
    _here.measure_by(stamp)


def mark_ranges(ranges: RangeMarker | None) -> RangeMarker | None:
    """See PhaseClock: of this process."""
    return _here.mark_ranges(ranges)


def begin() -> None:
    """Restart the clock of this process: earlier time does not count."""
    global _here  # noqa: PLW0603 - a process has one
    _here = PhaseClock()


_here = PhaseClock(age=max(0.0, time.time() - psutil.Process().create_time()))  # to a second

os.register_at_fork(after_in_child=begin)
