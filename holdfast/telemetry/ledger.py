"""The goodput ledger: how every rank of a run spent every second, from the run's events alone.

The wall time of a rank runs from the start (or restart) of the train step to the end of its last launch. Every moment
of it is in exactly one class, whichever events are missing. Time that a killed rank did not report is divided like the
rest of its attempt.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.spec.errors import ExitCode
from holdfast.telemetry.events import (
    AttemptBegan,
    Event,
    HangDetected,
    LaunchBegan,
    LaunchEnded,
    LaunchPending,
    Progress,
    RankEnded,
    SaveCommitted,
    StepBegan,
    StepEnded,
    TimeSpent,
)

Class = Literal[
    "productive",  # forward, backward and update of steps that the run kept
    "data",  # waited for batches
    "communication",  # waited for collectives that no computation hides
    "check",  # compared replicas, computed digests, reported
    "save",  # waited for saves
    "compile",  # made, sharded and compiled the model
    "queue",  # waited for what the launcher reported: a queue, pods, nodes
    "schedule",  # waited for a process otherwise: the launcher, the pause before a restart
    "start",  # processes began and met
    "restore",  # loaded the state
    "detect",  # from the first sign of a failure to the end of the launch
    "lost",  # computed steps that had to be computed again
    "end",  # processes ended when all was done
]
CLASSES: tuple[Class, ...] = get_args(Class)

_CLASS_OF: Mapping[str, Class] = {
    "start": "start",
    "meet": "start",
    "build": "compile",
    "restore": "restore",
    "script": "start",
    "data": "data",
    "forward": "productive",
    "backward": "productive",
    "pipeline": "productive",
    "optimizer": "productive",
    "communication": "communication",
    "check": "check",
    "save": "save",
    "leave": "save",
}
_BEFORE_STEPS = ("start", "script", "meet", "build", "restore")
_NEVER_LOST: tuple[Class, ...] = ("save",)
TRAIN = "train"  # the step of the DAG


@dataclass(frozen=True)
class Ledger:
    """Seconds by class, of each rank."""

    ranks: Mapping[int, Mapping[Class, float]]
    wall: float  # seconds from the beginning to the end, less those without a running train step

    @property
    def seconds(self) -> dict[Class, float]:
        """Of all ranks together, in the order of CLASSES."""
        totals = {name: sum(classes.get(name, 0.0) for classes in self.ranks.values()) for name in CLASSES}
        return {name: seconds for name, seconds in totals.items() if seconds > 0}

    @property
    def total(self) -> float:
        """Rank-seconds."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of all rank-seconds that computed steps which the run kept; 0 without any."""
        return self.seconds.get("productive", 0.0) / self.total if self.total else 0.0

    def figures(self) -> dict[str, float]:
        """As metrics: `goodput`, and rank-seconds as `ledger/…`."""
        return {"goodput": self.goodput} | {f"ledger/{name}": seconds for name, seconds in self.seconds.items()}

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        ranks = {str(rank): dict(classes) for rank, classes in sorted(self.ranks.items())}
        return {
            "wall_seconds": self.wall,
            "rank_seconds": self.total,
            "goodput": self.goodput,
            "seconds": self.seconds,
            "ranks": ranks,
        }


def ledger(events: Iterable[Event], until: float | None = None) -> Ledger:
    """The ledger of a run, from its events in their order, up to `until` (Unix seconds) or to the last event."""
    ranks: dict[int, dict[Class, float]] = {}
    wall = 0.0
    for span in _spans(list(events), until):
        wall += span.end - span.begin
        for rank in range(max((launch.ranks for launch in span.launches), default=0)):
            classes = ranks.setdefault(rank, {})
            for name, seconds in _spent(rank, span).items():
                classes[name] = classes.get(name, 0.0) + seconds
    return Ledger(ranks, wall)


def is_active(events: Sequence[Event]) -> bool:
    """Whether a train step still runs, according to its events."""
    spans = _spans(events, math.inf)
    return bool(spans) and spans[-1].end == math.inf


@dataclass
class _Attempt:
    number: int
    began: float | None = None  # when its ranks had loaded the state
    step: int = 0  # the step that they had loaded
    world: int | None = None
    reports: dict[int, list[TimeSpent]] = field(default_factory=dict)  # by ranks
    reached: list[tuple[float, int]] = field(default_factory=list)  # (time, step) of what rank 0 had done
    copied: dict[int, float] = field(default_factory=dict)  # step -> time at which it was done, for saved steps
    failed: float = math.inf  # the first sign of a failure
    lost_from: float = math.inf  # what was computed later was computed again

    def time_of(self, step: int) -> float:
        """When step `step` was done; infinity if unknown."""
        if step in self.copied:
            return self.copied[step]
        before: tuple[float, int] | None = None
        for moment, done in sorted(self.reached):
            if done >= step:
                if before is None or done == before[1]:
                    return moment
                return before[0] + (moment - before[0]) * (step - before[1]) / (done - before[1])
            before = (moment, done)
        return math.inf

    def usual(self) -> Mapping[str, float]:
        """The phases of its steps, of all ranks."""
        total: Counter[str] = Counter()
        for event in (event for reports in self.reports.values() for event in reports):
            total.update({name: seconds for name, seconds in event.seconds.items() if name not in _BEFORE_STEPS})
        return total if sum(total.values()) > 0 else {"forward": 1.0}


@dataclass
class _Launch:
    began: float
    ranks: int
    ended: float = math.inf
    code: int | None = None
    waits: list[float] = field(default_factory=list)  # when waiting was reported
    attempts: dict[int, _Attempt] = field(default_factory=dict)


@dataclass
class _Span:
    """A time in which a train step ran."""

    begin: float
    end: float = math.inf
    launches: list[_Launch] = field(default_factory=list)


class _Reader:
    """Sorts events into spans, launches and attempts."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        self._launches: dict[int | None, tuple[_Launch, _Span]] = {}
        self._attempts: dict[int, tuple[_Attempt, _Launch, _Span]] = {}

    def read(self, event: Event) -> None:
        """Read the next event."""
        if isinstance(event, StepBegan) and event.name == TRAIN:
            self._open(event.time)
        elif isinstance(event, LaunchBegan):
            self._launch_began(event)
        elif isinstance(event, LaunchEnded):
            self._launch_ended(event)
        elif isinstance(event, LaunchPending):
            if self.spans and self.spans[-1].launches:
                self.spans[-1].launches[-1].waits.append(event.time)
        elif isinstance(event, StepEnded) and event.name == TRAIN:
            self._close(event.time)
        elif isinstance(event, HangDetected) and self.spans and self.spans[-1].launches:
            for attempt in list(self.spans[-1].launches[-1].attempts.values())[-1:]:
                attempt.failed = min(attempt.failed, event.time - event.seconds)
        elif isinstance(event, AttemptBegan | TimeSpent | Progress | SaveCommitted | RankEnded) and event.attempt:
            self._of_attempt(event, event.attempt)

    def _open(self, when: float) -> _Span:
        if not self.spans or self.spans[-1].end < math.inf:
            self.spans.append(_Span(when))
        return self.spans[-1]

    def _close(self, when: float) -> None:
        if self.spans and self.spans[-1].end == math.inf:
            self.spans[-1].end = when

    def _launch_began(self, event: LaunchBegan) -> None:
        if event.adopted and event.launch in self._launches:
            launch, former_span = self._launches[event.launch]
            if self._continues(launch, former_span):  # its ranks worked while no launcher followed it
                launch.ended, launch.code, former_span.end = math.inf, None, math.inf
                return
        span = self._open(event.time)
        if span.launches:
            span.launches[-1].ended = min(span.launches[-1].ended, event.time)
        launch = _Launch(event.time, event.nodes * event.processes)
        span.launches.append(launch)
        self._launches[event.launch] = launch, span

    def _continues(self, launch: _Launch, span: _Span) -> bool:
        """Whether no launch began since `launch` of `span`. Launchers that started meanwhile become part of the
        span."""
        if span.launches[-1] is not launch or any(later.launches for later in self.spans[self.spans.index(span) + 1 :]):
            return False
        while self.spans[-1] is not span:
            span.end = self.spans.pop().end
        return True

    def _continue(self, launch: _Launch, span: _Span, when: float) -> None:
        """Record that ranks of `launch` work. If its launcher has left meanwhile, the launch ends later than its
        launcher reported."""
        launcher_left = launch.code == ExitCode.TERMINATED and when > launch.ended
        if (launcher_left or (launch.ended == math.inf and when > span.end)) and self._continues(launch, span):
            launch.ended = when if launcher_left else math.inf
            span.end = max(span.end, when)

    def _launch_ended(self, event: LaunchEnded) -> None:
        span = self._open(event.time)
        if span.launches:
            launch = span.launches[-1]
            launch.ended, launch.code = min(launch.ended, event.time), event.code
        if event.restart_in is None:
            self._close(event.time)

    def _new_attempt(self, event: Event, number: int) -> tuple[_Attempt, _Launch, _Span]:
        if (newest := next(reversed(self._launches.values()), None)) is not None:
            self._continue(*newest, event.time)
        if self.spans and self.spans[-1].end < math.inf and self.spans[-1].launches:
            span = self.spans[-1]  # reported late
        else:
            span = self._open(event.time - (sum(event.seconds.values()) if isinstance(event, TimeSpent) else 0.0))
        if not span.launches:
            span.launches.append(_Launch(span.begin, 0))  # another program started its ranks
        launch = span.launches[-1]
        attempt = launch.attempts[number] = _Attempt(number)
        return attempt, launch, span

    def _of_attempt(self, event: AttemptBegan | TimeSpent | Progress | SaveCommitted | RankEnded, number: int) -> None:
        if number not in self._attempts:
            self._attempts[number] = self._new_attempt(event, number)
        attempt, launch, span = self._attempts[number]
        if not isinstance(event, RankEnded):
            self._continue(launch, span, event.time)
        if isinstance(event, AttemptBegan):
            attempt.began, attempt.step, attempt.world = event.time, event.step, event.world
            attempt.reached.append((event.time, event.step))
            launch.ranks = max(event.world, launch.ranks if len(launch.attempts) > 1 else 0)
        elif isinstance(event, TimeSpent):
            attempt.reports.setdefault(event.rank, []).append(event)
            launch.ranks = max(launch.ranks, event.rank + 1)
            if event.rank == 0:
                attempt.reached.append((event.time, event.step))
            if event.failed:
                attempt.failed = min(attempt.failed, event.time)
        elif isinstance(event, Progress):
            attempt.reached.append((event.time, event.step))
        elif isinstance(event, SaveCommitted):
            attempt.copied[event.step] = event.time - event.seconds
        elif event.code not in (ExitCode.OK, ExitCode.PREEMPTED):
            attempt.failed = min(attempt.failed, event.time)


def _spans(events: Sequence[Event], until: float | None) -> list[_Span]:
    reader = _Reader()
    for event in events:
        reader.read(event)
    last = events[-1].time if events else 0.0
    spans = [span for span in reader.spans if span.begin < (last if until is None else until)]
    for span in spans:
        span.end = min(span.end, last if until is None else until)
    attempts = [each for span in spans for launch in span.launches for each in launch.attempts.values()]
    started = [attempt for attempt in sorted(attempts, key=lambda each: each.number) if attempt.began is not None]
    for index, attempt in enumerate(started):
        if later := started[index + 1 :]:
            kept = min(each.step for each in later)
            attempt.lost_from = -math.inf if kept < attempt.step else attempt.time_of(kept)
    return spans


def _spent(rank: int, span: _Span) -> Mapping[Class, float]:
    """How a rank spent a span. Every moment is added once: `at` only goes forward, and each addition ends at it."""
    spent: dict[Class, float] = defaultdict(float)
    at = span.begin

    def fill(upto: float, name: Class) -> None:
        nonlocal at
        upto = min(upto, span.end)
        if upto > at:
            spent[name] += upto - at
            at = upto

    def work(upto: float, phases: Mapping[str, float], lost_from: float) -> None:
        nonlocal at
        upto = min(upto, span.end)
        if upto > at and (total := sum(phases.values())) > 0:
            for name, seconds in _classes(
                at, upto, {n: seconds_of_phase / total for n, seconds_of_phase in phases.items()}, lost_from
            ):
                spent[name] += seconds
            at = upto

    def wait(upto: float, launch: _Launch) -> None:
        """Add the wait for a process of the rank."""
        fill(min((moment for moment in launch.waits if at <= moment < upto), default=upto), "schedule")
        fill(upto, "queue")

    for launch in span.launches:
        fill(launch.began, "schedule")
        attempts = sorted(launch.attempts.values(), key=lambda each: each.number)
        for index, attempt in enumerate(attempts):
            following = attempts[index + 1] if index + 1 < len(attempts) else None
            end_time = min(launch.ended, span.end) if following is None else _first_sign(following, rank)
            reports = attempt.reports.get(rank, [])
            wait(min(_first_sign(attempt, rank), end_time), launch)
            for event in reports:
                begin = event.time - sum(event.seconds.values())
                work(min(begin, end_time), attempt.usual(), attempt.lost_from)
                work(min(event.time, end_time), event.seconds, attempt.lost_from)
            failure_time = min(attempt.failed, end_time) if following or launch.code != ExitCode.OK else end_time
            if not (reports and reports[-1].last):
                work(failure_time, attempt.usual(), attempt.lost_from)
            if following is not None:
                wait(end_time, launch)
            elif launch.code is not None:
                fill(end_time, "end" if launch.code in (ExitCode.OK, ExitCode.PREEMPTED) else "detect")
        wait(launch.ended, launch)
    fill(span.end, "schedule")
    return spent


def _first_sign(attempt: _Attempt, rank: int) -> float:
    """When the rank's process in an attempt began, as far as known."""
    reports = attempt.reports.get(rank) or next(iter(attempt.reports.values()), [])
    if reports:
        return reports[0].time - sum(reports[0].seconds.values())
    return attempt.failed if attempt.began is None else attempt.began


def _classes(begin: float, end: float, shares: Mapping[str, float], lost_from: float) -> Iterable[tuple[Class, float]]:
    """Seconds by class of a time in which phases had `shares`. The phases before the first step come first; the rest is
    uniform."""
    length = end - begin
    steps = begin + length * sum(share for name, share in shares.items() if name in _BEFORE_STEPS)
    repeated = (end - max(steps, min(lost_from, end))) / (end - steps) if end > steps else 0.0  # a share of the steps
    for name, share in shares.items():
        class_name = _CLASS_OF.get(name, "check")
        if name in _BEFORE_STEPS or class_name in _NEVER_LOST:
            yield class_name, length * share
        else:
            kinds: tuple[tuple[Class, float], ...] = ((class_name, 1 - repeated), ("lost", repeated))
            yield from ((kind, length * share * part) for kind, part in kinds if part > 0)
