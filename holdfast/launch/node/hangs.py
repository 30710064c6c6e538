"""Whether a gang hangs, and which rank is to blame: a pure decision over what is seen of each rank.

A rank is suspected when the others wait for it and it does nothing. What it would need to be doing nothing for is
bounded by its phase: a few steps within a step, minutes where it loads, compiles or saves. A rank that computes, or
that would if it were given a core, gets many times as long: a loaded machine hangs nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.runtime.heartbeat import Seen
from holdfast.telemetry.phases import PHASES, Phase

STEPS, SECONDS = 3.0, 1.0  # within a step: so many usual steps and so many seconds,
MARGIN = 0.4  # of which this is for looking and telling
SPREAD = 2.0  # or so many times the longest of the newest steps
ALL_WAIT = 5.0  # seconds more where every rank waits in the same place: the network between them may be slow
BUSY, BUSY_SECONDS = 10.0, 120.0  # one that computes, or that nobody waits for: so many times as long, at least so long
ACROSS_NODES = 15.0  # seconds more for a rank of another node: what is known of it is old, and its machine may be busy
UNHEARD = 60.0  # seconds that a node has told nothing: one that could not for a moment, and goes on, hangs nobody
STOPPED_OUTSIDE = 10.0  # seconds that a stopped rank has where steps have no usual time yet, or where it is alone
ALL_STOPPED = 600.0  # whoever stops a whole gang, or all ranks of a node, may mean it; the collectives give up then
REQUESTING = 300.0  # a request to the store has a deadline of its own
FIRST_STEPS = 900.0  # they may compile
ASLEEP = 120.0  # seconds in which a rank in one of them, which waits for no other, did nothing: it compiles nothing
LONG: Mapping[Phase, float] = {
    "start": 1800.0,
    "meet": 900.0,  # the process group gives up after ten minutes
    "build": 4200.0,  # it compiles
    "restore": 4200.0,  # the gang's collectives give up after an hour; the first weights may come over the network
    "save": 900.0,  # a copy gives up after ten minutes
    "leave": 4200.0,
}
# From the end of one step to that of the next: `check` counts a step as done.
ORDER: Sequence[Phase] = (
    "start", "meet", "build", "restore", "check", "save", "data", "forward", "backward", "pipeline", "communication",
    "optimizer", "leave",
)  # fmt: skip


@dataclass(frozen=True)
class Watched:
    """A rank as its node sees it. Seconds are counted while the watcher itself was given time."""

    seen: Seen
    quiet: float  # since its last mark
    idle: float = 0.0  # of these, without any thread that ran or wanted to
    stopped: float = 0.0  # of these, stopped by a signal, or on a node of which nothing is heard
    unheard: bool = False  # which of the two

    @property
    def phase(self) -> Phase:
        """What it does."""
        return PHASES[self.seen.phase]

    @property
    def step(self) -> int:
        """The step that it is in, from 1."""
        return self.seen.step + (self.phase not in ("check", "save", "leave"))

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.seen.waiting or self.phase == "communication"

    @property
    def place(self) -> tuple[int, int]:
        """How far it has come: that of a rank further behind is smaller."""
        return self.seen.step, ORDER.index(self.phase)


@dataclass(frozen=True)
class Hang:
    """A gang that hangs."""

    suspects: tuple[Watched, ...]  # at least one
    others: int  # ranks that wait for them, as far as they are known

    @property
    def seconds(self) -> float:
        """Since the last mark of a suspect."""
        return min(one.quiet for one in self.suspects)

    def words(self, node: str) -> str:
        """The hang for a person; `node` is that of the suspects."""
        first = self.suspects[0]
        ranks = ", ".join(str(one.seen.rank) for one in self.suspects)
        where = f"in the phase {first.phase} of step {first.step}"
        if first.stopped:
            how = "nothing is heard of its node" if first.unheard else "its process is stopped by a signal"
        elif first.waiting:
            how = "it waits for other ranks there"
        else:
            how = "it sleeps" if first.idle else "it computes without an end"
        who = f"ranks {ranks} hang" if len(self.suspects) > 1 else f"rank {ranks} hangs"
        waiting = f"; {self.others} more wait" if self.others else ""
        return f"{who} on {node}, {where}, since {self.seconds:.1f} s: {how}{waiting}"


def judge(ranks: Sequence[Watched], more: float = 0.0) -> Hang | None:
    """The hang, if the gang has one. `ranks` are those that are known: all of the gang, or those of one node. `more`:
    seconds that each has beside its time within a step."""
    if not ranks:
        return None
    whole = len(ranks) == ranks[0].seen.world
    stopped = [one for one in ranks if one.stopped]
    awake = [one for one in ranks if not one.waiting]
    if stopped:
        suspects = stopped
    elif awake:
        suspects = _furthest_behind(awake)
    elif whole:
        suspects = _furthest_behind(ranks)
    else:  # they wait for a rank of another node
        return None
    others = [one for one in ranks if one not in suspects]
    usual = [one.seen.usual for one in ranks]
    known = [each for each in usual if each is not None]
    soon = None
    if len(known) == len(usual):
        soon = max(STEPS * max(known) + SECONDS - MARGIN, SPREAD * max(max(one.seen.steps) for one in ranks)) + more
    # Some finish a collective a little before others; far apart, they are in different ones.
    together = not awake and not others
    if not all(_is_up(one, soon, alone=not others, together=together) for one in suspects):
        return None
    # Nobody hangs while a rank goes on: the others may not need it yet.
    enough = (soon or STOPPED_OUTSIDE) / 2
    if not all(one.waiting or one.idle >= enough for one in others):
        return None
    # What is known of a node that is not heard is old: its ranks go on where those that meet them do.
    if any(one.unheard for one in suspects) and any(one.quiet < enough for one in others):
        return None
    return Hang(tuple(suspects), len(others))


def _furthest_behind(ranks: Sequence[Watched]) -> list[Watched]:
    least = min(one.place for one in ranks)
    return [one for one in ranks if one.place == least]


def _is_up(one: Watched, soon: float | None, *, alone: bool, together: bool) -> bool:
    """Whether the time of a suspect is up. `soon`: what a rank has within a step; None before steps have a usual
    time. `alone`: no rank that is known waits for it. `together`: all ranks wait in the same place."""
    if one.stopped:
        patience = max(soon or 0.0, UNHEARD) if one.unheard else soon or STOPPED_OUTSIDE
        if alone:
            patience = ALL_STOPPED if one.seen.world > 1 else max(patience, STOPPED_OUTSIDE)
        return one.stopped >= patience
    if one.phase in LONG:
        return one.quiet >= LONG[one.phase]
    if one.phase == "data" and one.seen.requests:
        return one.quiet >= (FIRST_STEPS if soon is None else REQUESTING)
    if soon is None:
        return one.quiet >= FIRST_STEPS or (not one.waiting and one.idle >= ASLEEP)
    patience = max(BUSY * soon, BUSY_SECONDS)
    if one.waiting:  # for what its own threads have received, perhaps, and get no core to pass on
        return one.idle >= soon + (ALL_WAIT if together else 0.0) or one.quiet >= patience
    return one.idle >= (patience if alone else soon) or one.quiet >= patience
