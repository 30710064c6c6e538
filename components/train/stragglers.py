"""A rank that is slower than its like is named, with the phase that takes it longer.

All others wait for the slowest rank, so every rank's steps take equally long: compared is the time that each spends at
work, without what it waits for others (`runtime.place`). Sums of a few steps go round asynchronously and are read one
later, so no step waits. A rank is named when it was slower over such windows, in three of four at least, and for long
enough: what lasts a moment is chance, and a window in which it was not may be, too.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from holdfast.components.runtime import place
from holdfast.components.runtime.gang import Gang, PendingValues
from holdfast.components.runtime.node import node_name
from holdfast.components.telemetry import emit
from holdfast.components.telemetry.events import StragglerNamed
from holdfast.components.telemetry.phases import PHASES, STEP_PHASES, Phase
from holdfast.components.train.observers import FinishedStep

WINDOW = 4  # steps
WINDOWS, OF = 3, 4  # so many of the last so many: four windows, and the step in which they are read, are within 20
SLOWER = 1.2  # times the work of its like, over all of them,
HARDLY = 1.1  # and so much in each that counts
LASTING = 0.6  # seconds of its work that it has to go on: where others work, a rank may lose a moment
LEAST = 0.001  # seconds a step, below which nothing is worth telling
WORK = tuple(phase for phase in STEP_PHASES if phase != "communication")

log = logging.getLogger("holdfast.train")


@dataclass(frozen=True)
class Slow:
    """A rank that is slower than its like."""

    rank: int
    ratio: float  # of its work to theirs
    phase: Phase  # that takes it longest beyond theirs
    seconds: float  # a step, by which that phase is longer


@dataclass
class _Spell:
    """The time in which a rank was slower, from the first window in which it was."""

    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=OF))  # its work, and what is usual
    seconds: float = 0.0
    told: bool = False

    def add(self, total: float, usual: float, seconds: float) -> bool:
        """Take in a window: of a rank's work and of what is usual, in seconds a step. Whether it is to be told now."""
        if not self.windows and total < HARDLY * usual:
            return False
        self.windows.append((total, usual))
        self.seconds += seconds
        fast = sum(work < HARDLY * others for work, others in self.windows)
        if fast > OF - WINDOWS:
            self.windows.clear()
            self.seconds, self.told = 0.0, False
            return False
        count = len(self.windows)
        work, others = map(sum, zip(*self.windows, strict=True))
        slower = work >= SLOWER * others and work - others >= LEAST * count
        if self.told or count - fast < WINDOWS or self.seconds < LASTING or not slower:
            return False
        self.told = True
        return True


class Comparison:
    """Compares the windows of all ranks. Ranks with the same `like` have the same work to do."""

    def __init__(self, like: Sequence[int]) -> None:
        self._groups: Mapping[int, list[int]] = {
            key: [rank for rank, each in enumerate(like) if each == key] for key in set(like)
        }
        self._spells = [_Spell() for _ in like]

    def window(self, seconds: Sequence[Sequence[float]], steps: float = math.inf) -> list[Slow]:
        """The ranks that have now been slow for long enough, each told once while it stays so. `seconds`: of each rank,
        for each of WORK, for a step; `steps`: times that, the work of the window."""
        found = []
        for ranks in self._groups.values():
            usual = median_low([sum(seconds[rank]) for rank in ranks])
            for rank in ranks:
                total = sum(seconds[rank])
                if self._spells[rank].add(total, usual, total * steps):
                    others = [seconds[other] for other in ranks if other != rank]
                    beyond = [
                        mine - median_low([other[index] for other in others])
                        for index, mine in enumerate(seconds[rank])
                    ]
                    worst = max(range(len(WORK)), key=beyond.__getitem__)
                    found.append(Slow(rank, total / max(usual, 1e-9), WORK[worst], beyond[worst]))
        return found


class Stragglers:
    """See Observer. Every rank has one; rank 0 tells."""

    def __init__(self, gang: Gang, like: int, work: int) -> None:
        """A collective call. `like`: ranks with the same number compute the same kind of thing; `work`: how much of it
        this rank has to do, in whatever unit they share."""
        self._gang, self._work = gang, work
        told = gang.all_gather((like, node_name()), tuple[int, str])
        self._comparison, self._nodes = Comparison([each for each, _ in told]), [node for _, node in told]
        self._before: list[float] | None = None  # at the end of the last window
        self._pending: PendingValues | None = None

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer. A collective call."""
        if self._pending is not None:
            self._tell(finished.step, self._comparison.window(self._pending.result(), WINDOW * self._work))
            self._pending = None
        if finished.step % WINDOW == 0:
            now = [place.here.own(PHASES.index(phase)) for phase in WORK]
            if self._before is not None:  # the first steps compile
                spent = [(end - begin) / WINDOW / self._work for begin, end in zip(self._before, now, strict=True)]
                self._pending = self._gang.gather_later(spent)
            self._before = now

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}

    def _tell(self, step: int, slow: Sequence[Slow]) -> None:
        for one in slow if self._gang.rank == 0 else ():
            seconds = one.seconds * self._work
            event = StragglerNamed(
                rank=one.rank, host=self._nodes[one.rank], phase=one.phase, ratio=one.ratio, step=step,
                seconds=seconds,
            )  # fmt: skip
            log.warning("%s", event.text)
            emit(event)
