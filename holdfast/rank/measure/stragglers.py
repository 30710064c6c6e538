"""Straggler detection: reports a rank that is slower than its peers, with the phase in which it loses time.

All ranks wait for the slowest one, so their steps take equally long. The comparison therefore uses working time,
without waits for other ranks (`runtime.heartbeat`). Sums of a few steps are gathered asynchronously and read one step
later. A rank is reported if it was slower in at least three of four such windows, and for long enough. Short slowdowns
are chance, and one fast window may be chance too.

The baseline is how often ranks were slower, and how much they usually differ, over the last windows. Ranks that share
cores are slower alternately, which makes both high. Then a rank is reported only after PATIENCE slow windows. While the
baseline is short, a rank is reported only if it is slower by the same ratio in each window.
"""

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, median_low, pstdev

from holdfast.collectives import Gang, PendingValues
from holdfast.rank.observers import FinishedStep
from holdfast.runtime import heartbeat
from holdfast.runtime.node import node_name
from holdfast.telemetry import emit
from holdfast.telemetry.events import StragglerDetected
from holdfast.telemetry.phases import PHASES, STEP_PHASES, Phase

WINDOW = 4  # steps
WINDOWS, OF = 3, 4  # slow windows needed, of the last OF: four windows and the step that reads them are within 20
SLOWER = 1.2  # times the work of its peers, over all windows,
HARDLY = 1.1  # and at least this in each window that counts
LASTING = 0.6  # seconds of its work that a slowdown must last, as a rank may lose a moment to other processes
LEAST = 0.001  # seconds per step, below which nothing is reported
PATIENCE = 64  # slow windows needed where ranks are slow alternately
HISTORY = 256  # windows of the baseline
CHANCE = 0.17  # share of windows in which a rank is slower, above which ranks are slow alternately,
FEW = 4  # and the number of windows up to which the share is not used
USUAL = 4.0  # times the usual difference of ranks, as logarithms of ratios, that a straggler must exceed
# A baseline of fewer windows than the first number is short. The ratios of a reported rank then deviate by at most this
# share of their mean.
EVEN = ((10, 0.03), (PATIENCE, 0.35))
WORK = tuple(phase for phase in STEP_PHASES if phase != "communication")

log = logging.getLogger("holdfast.train")


@dataclass(frozen=True)
class Slow:
    """A rank that is slower than its peers."""

    rank: int
    ratio: float  # of its work to that of its peers
    phase: Phase  # in which it exceeds them most
    seconds: float  # per step, by which it exceeds them in that phase


@dataclass
class _Spell:
    """The windows in which a rank was slower, from the first such window."""

    windows: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=OF))  # own and usual work
    seconds: float = 0.0
    length: int = 0  # windows
    reported: bool = False

    def add(self, total: float, usual: float, seconds: float) -> bool:
        """Add a window with the rank's work and the usual work, in seconds per step. Returns whether the rank has
        been slow for long enough and is not reported yet."""
        if not self.windows and total < HARDLY * usual:
            return False
        self.windows.append((total, usual))
        self.seconds += seconds
        self.length += 1
        fast = sum(work < HARDLY * others for work, others in self.windows)
        if fast > OF - WINDOWS:
            self.windows.clear()
            self.seconds, self.length, self.reported = 0.0, 0, False
            return False
        count = len(self.windows)
        work, others = map(sum, zip(*self.windows, strict=True))
        slower = work >= SLOWER * others and work - others >= LEAST * count
        return slower and not self.reported and count - fast >= WINDOWS and self.seconds >= LASTING

    @property
    def ratios(self) -> list[float]:
        """Logarithms of its slowdown in the slow windows."""
        return [math.log(work / max(usual, 1e-9)) for work, usual in self.windows if work >= HARDLY * usual]


class _Baseline:
    """How often ranks with the same work are slower than usual, and how much they differ."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._slow: deque[frozenset[int]] = deque(maxlen=HISTORY)  # the ranks that were slower, in each window
        self._logs: deque[dict[int, float]] = deque(maxlen=HISTORY)  # of the ratios, without those of named ranks

    def add(self, works: Mapping[int, float], usual: float, named: Collection[int]) -> None:
        """Add a window with each rank's work and the usual work. `named` are the ranks known to be slow."""
        least = max(HARDLY * usual, usual + LEAST)
        self._slow.append(frozenset(rank for rank, work in works.items() if work >= least))
        self._logs.append(
            {
                rank: abs(math.log(max(work, 1e-9) / max(usual, 1e-9)))
                for rank, work in works.items()
                if rank not in named
            }
        )

    def forget(self, rank: int, length: int) -> None:
        """Remove the last `length` windows of a reported rank from the usual differences."""
        for window in list(self._logs)[-length:]:
            window.pop(rank, None)

    def is_chance(self, rank: int, spell: _Spell) -> bool:
        """Whether a slowdown of this length may be chance."""
        if spell.length >= PATIENCE:
            return False
        before, ratios = max(0, len(self._slow) - spell.length), spell.ratios
        if any(before < windows and pstdev(ratios) > share * fmean(ratios) for windows, share in EVEN):
            return True
        differences = [sum(window.values()) / max(1, self._ranks - 1) for window in list(self._logs)[:before]]
        if differences and fmean(ratios) < USUAL * median(differences):
            return True
        count = sum(len(slow) for slow in self._slow) - sum(rank in slow for slow in list(self._slow)[before:])
        others = (self._ranks - 1) * len(self._slow) + before  # windows of a rank, without those of the slowdown
        return count > max(CHANCE * others, FEW)


class Comparison:
    """Compares the windows of all ranks. Ranks with the same `like` have the same work."""

    def __init__(self, like: Sequence[int]) -> None:
        self._groups: Mapping[int, list[int]] = {
            key: [rank for rank, kind in enumerate(like) if kind == key] for key in set(like)
        }
        self._spells = [_Spell() for _ in like]
        self._baselines = {key: _Baseline(len(ranks)) for key, ranks in self._groups.items()}

    def window(self, seconds: Sequence[Sequence[float]], steps: float = math.inf) -> list[Slow]:
        """The ranks that have now been slow for long enough. Each is reported once while it stays slow. `seconds`
        has each rank's seconds per step for each phase of WORK. `steps` times that is the work of the window."""
        slow = []
        for key, ranks in self._groups.items():
            baseline, works = self._baselines[key], {rank: sum(seconds[rank]) for rank in ranks}
            usual = median_low(works.values())
            long = [rank for rank in ranks if self._spells[rank].add(works[rank], usual, works[rank] * steps)]
            baseline.add(works, usual, [rank for rank in ranks if self._spells[rank].reported])
            for rank in long:
                spell = self._spells[rank]
                if baseline.is_chance(rank, spell):
                    continue
                spell.reported = True
                baseline.forget(rank, spell.length)
                slow.append(_slow(rank, works[rank] / max(usual, 1e-9), seconds, ranks))
        return slow


def _slow(rank: int, ratio: float, seconds: Sequence[Sequence[float]], ranks: Sequence[int]) -> Slow:
    """A slow rank, with the phase in which it exceeds the usual time of `ranks` most."""
    others = [seconds[other] for other in ranks if other != rank]
    beyond = [own - median_low([other[index] for other in others]) for index, own in enumerate(seconds[rank])]
    worst = max(range(len(WORK)), key=beyond.__getitem__)
    return Slow(rank, ratio, WORK[worst], beyond[worst])


class Stragglers:
    """See Observer. Every rank has one, and rank 0 reports."""

    def __init__(self, gang: Gang, like: int, work: int) -> None:
        """A collective call. Ranks with the same `like` do the same kind of work. `work` is this rank's amount of
        it, in a unit that they share."""
        self._gang, self._work = gang, work
        peers = gang.all_gather((like, node_name()), tuple[int, str])
        self._comparison, self._nodes = Comparison([kind for kind, _ in peers]), [node for _, node in peers]
        self._before: list[float] | None = None  # at the end of the last window
        self._pending: PendingValues | None = None

    def on_step(self, finished: FinishedStep) -> None:
        """See Observer. A collective call."""
        if self._pending is not None:
            self._tell(finished.step, self._comparison.window(self._pending.result(), WINDOW * self._work))
            self._pending = None
        if finished.step % WINDOW == 0:
            now = [heartbeat.here.own(PHASES.index(phase)) for phase in WORK]
            if self._before is not None:  # the first steps compile
                durations = [(end - begin) / WINDOW / self._work for begin, end in zip(self._before, now, strict=True)]
                self._pending = self._gang.gather_later(durations)
            self._before = now

    def on_save(self, step: int) -> Mapping[str, str]:  # noqa: ARG002
        """See Observer."""
        return {}

    def _tell(self, step: int, slow: Sequence[Slow]) -> None:
        for straggler in slow if self._gang.rank == 0 else ():
            seconds = straggler.seconds * self._work
            event = StragglerDetected(
                rank=straggler.rank,
                host=self._nodes[straggler.rank],
                phase=straggler.phase,
                ratio=straggler.ratio,
                step=step,
                seconds=seconds,
            )
            log.warning("%s", event.text)
            emit(event)
