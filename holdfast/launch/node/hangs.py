"""Decision whether a gang hangs, and which rank is to blame: a pure function of the observed ranks.

A rank is suspected when other ranks wait for it while it does nothing. Its phase bounds how long it may do nothing: a
few steps within a step, minutes while it loads, compiles or saves. A rank that computes, or would with a free core,
gets many times as long, so a loaded machine causes no hang.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.runtime.heartbeat import Seen
from holdfast.telemetry.phases import PHASES, Phase

STEPS, SECONDS = 3.0, 1.0  # limit within a step: this many usual steps plus this many seconds,
MARGIN = 0.4  # less this for polling and reporting,
SPREAD = 2.0  # or this many times the longest of the newest steps
ALL_WAIT = 5.0  # seconds more if every rank waits in the same place: their network may be slow
BUSY, BUSY_SECONDS = 10.0, 120.0  # factor and least time for a rank that computes, or that no rank waits for
ACROSS_NODES = 15.0  # seconds more for a rank of another node: its data is old, and its machine may be busy
UNHEARD = 60.0  # seconds without a message from a node: a short pause is no hang
STOPPED_OUTSIDE = 10.0  # seconds for a stopped rank while steps have no usual time yet, or if it is alone
ALL_STOPPED = 600.0  # a person may stop a whole gang, or all ranks of a node, on purpose; then the collectives give up
REQUESTING = 300.0  # a request to the store has its own deadline; one to a server of answers may take longer
FIRST_STEPS = 900.0  # for the first steps, which may compile
ASLEEP = 120.0  # seconds in which a rank did nothing in a first step, without waiting for another: it does not compile
LONG: Mapping[Phase, float] = {
    "start": 1800.0,
    "meet": 900.0,  # the process group gives up after ten minutes
    "build": 4200.0,  # it compiles
    "restore": 4200.0,  # the collectives give up after an hour; the first weights may come over the network
    "save": 900.0,  # a copy gives up after ten minutes
    "leave": 4200.0,
    "script": math.inf,  # nothing is known of what it does
}
# From the end of one step to the end of the next: `check` counts a step as done.
ORDER: Sequence[Phase] = (
    "start",
    "script",
    "meet",
    "build",
    "restore",
    "check",
    "save",
    "data",
    "generate",
    "forward",
    "backward",
    "pipeline",
    "communication",
    "optimizer",
    "leave",
)


@dataclass(frozen=True)
class Watched:
    """A rank as its node sees it. Seconds count only while the watcher itself gets CPU time."""

    seen: Seen
    quiet: float  # since its last mark
    idle: float = 0.0  # part of `quiet` in which no thread ran or could run
    stopped: float = 0.0  # part of `quiet` in which a signal stopped it, or its node was silent
    unheard: bool = False  # whether it is its node that was silent

    @property
    def phase(self) -> Phase:
        """Its phase."""
        return PHASES[self.seen.phase]

    @property
    def step(self) -> int:
        """Its step, from 1."""
        return self.seen.step + (self.phase not in ("check", "save", "leave"))

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.seen.waiting or self.phase == "communication"

    @property
    def place(self) -> tuple[int, int]:
        """Its progress: smaller for a rank that is further behind."""
        return self.seen.step, ORDER.index(self.phase)


@dataclass(frozen=True)
class Hang:
    """A gang that hangs."""

    suspects: tuple[Watched, ...]  # at least one
    others: int  # known ranks that wait for the suspects

    @property
    def seconds(self) -> float:
        """Time since the last mark of a suspect."""
        return min(rank.quiet for rank in self.suspects)

    def words(self, node: str) -> str:
        """The description of the hang; `node` is that of the suspects."""
        first = self.suspects[0]
        ranks = ", ".join(str(suspect.seen.rank) for suspect in self.suspects)
        place = f"in the phase {first.phase} of step {first.step}"
        if first.stopped:
            activity = "nothing is heard of its node" if first.unheard else "its process is stopped by a signal"
        elif first.waiting:
            activity = "it waits for other ranks there"
        else:
            activity = "it sleeps" if first.idle else "it computes without an end"
        subject = f"ranks {ranks} hang" if len(self.suspects) > 1 else f"rank {ranks} hangs"
        more = f"; {self.others} more wait" if self.others else ""
        return f"{subject} on {node}, {place}, since {self.seconds:.1f} s: {activity}{more}"


def judge(ranks: Sequence[Watched], more: float = 0.0) -> Hang | None:
    """The hang, if the gang has one. `ranks` are the known ranks: all of the gang, or those of one node. `more`:
    seconds that each has in addition to its time within a step."""
    if not ranks:
        return None
    complete = len(ranks) == ranks[0].seen.world
    stopped = [one for one in ranks if one.stopped]
    awake = [one for one in ranks if not one.waiting]
    if stopped:
        suspects = stopped
    elif awake:
        suspects = _furthest_behind(awake)
    elif complete:
        suspects = _furthest_behind(ranks)
    else:  # they wait for a rank of another node
        return None
    others = [one for one in ranks if one not in suspects]
    usual = [one.seen.usual for one in ranks]
    known = [each for each in usual if each is not None]
    soon = None
    if len(known) == len(usual):
        soon = max(STEPS * max(known) + SECONDS - MARGIN, SPREAD * max(max(one.seen.steps) for one in ranks)) + more
    # Some ranks leave a collective a little before others; far apart, they are in different ones.
    together = not awake and not others
    if not all(_is_up(one, soon, alone=not others, together=together) for one in suspects):
        return None
    # No rank hangs while another one makes progress: that one may not need it yet.
    enough = (soon or STOPPED_OUTSIDE) / 2
    if not all(one.waiting or one.idle >= enough for one in others):
        return None
    # The data of a silent node is old: its ranks make progress if the ranks that meet them do.
    if any(one.unheard for one in suspects) and any(one.quiet < enough for one in others):
        return None
    return Hang(tuple(suspects), len(others))


def _furthest_behind(ranks: Sequence[Watched]) -> list[Watched]:
    least = min(rank.place for rank in ranks)
    return [rank for rank in ranks if rank.place == least]


def _is_up(one: Watched, soon: float | None, *, alone: bool, together: bool) -> bool:
    """Whether a suspect has exceeded its time. `soon`: limit within a step in seconds, None before steps have a usual
    time. `alone`: no known rank waits for it. `together`: all ranks wait in the same place."""
    if one.stopped:
        patience = max(soon or 0.0, UNHEARD) if one.unheard else soon or STOPPED_OUTSIDE
        if alone:
            patience = ALL_STOPPED if one.seen.world > 1 else max(patience, STOPPED_OUTSIDE)
        return one.stopped >= patience
    if one.phase in LONG:
        return one.quiet >= LONG[one.phase]
    if one.phase in ("data", "generate") and one.seen.requests:
        limit = REQUESTING + one.seen.allowed
        return one.quiet >= (max(FIRST_STEPS, limit) if soon is None else limit)
    if soon is None:
        return one.quiet >= FIRST_STEPS or (not one.waiting and one.idle >= ASLEEP)
    patience = max(BUSY * soon, BUSY_SECONDS)
    if one.waiting:  # possibly for data that its own threads received and get no core to pass on
        return one.idle >= soon + (ALL_WAIT if together else 0.0) or one.quiet >= patience
    return one.idle >= (patience if alone else soon) or one.quiet >= patience
