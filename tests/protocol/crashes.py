"""Every crash point of a training's storage: the operations are numbered, and a process ends before or after each.

The process of the operation ends, or its whole gang, as in a power failure. It ends permanently, or until its successor
has finished (a frozen attempt that is thawed). The supervisor starts the next gang, and the oracle checks it: no
committed state is lost, no state is incomplete at any moment, and the final bits equal those of an undisturbed run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tests.protocol.scenario import Plan, Run
from tests.protocol.world import Process, World

OF_ONE = Plan(steps=2, keep_last=1, sizes=(1,), columns=(False,))
OF_TWO = Plan(steps=3, keep_last=1, keep_every=2, sizes=(2,), columns=(False,))
# Other numbers of ranks and cuts after a crash.
WITH_NODES = Plan(steps=2, keep_last=1, sizes=(3, 5), columns=(False, True))
PLANS = {"one rank": OF_ONE, "two ranks": OF_TWO, "nodes above the ranks": WITH_NODES}


@dataclass(frozen=True)
class Crash:
    """Operation `number` of a run (from 0) is the last one of its process. `when` is "before" or "after" it."""

    number: int
    when: str = "before"
    gang: bool = True  # whether the whole gang ends, or only the process
    thaw: bool = False  # whether they only freeze until their successor has finished


class Crashes:
    """Lets a run crash at these operations, in order. Each number counts from the previous crash."""

    def __init__(self, run: Run, crashes: Sequence[Crash]) -> None:
        self._run, self._waiting, self._since = run, list(crashes), 0
        run.network.on_request, run.disturbed = self._heed, len(crashes)

    @property
    def all_happened(self) -> bool:
        """Whether the run was long enough for every crash."""
        return not self._waiting

    def _heed(self, number: int, when: str, operation: str, key: str, process: Process) -> None:
        if not self._waiting or (self._waiting[0].number, self._waiting[0].when) != (number - self._since, when):
            return
        crash, self._since = self._waiting.pop(0), number + 1
        world = self._run.world
        world.note(f"{process.name} {'stands still' if crash.thaw else 'dies'} {when} {operation} {key}")
        for member in self._run.gang_of(process).processes if crash.gang else [process]:
            if crash.thaw:
                member.frozen = not member.dead
            else:
                world.kill(member)


def crash(plan: Plan, crashes: Sequence[Crash], trace: list[str] | None = None) -> tuple[bool, int]:
    """Run `plan` with these crashes. Returns whether all of them happened, and the number of operations. Raises what
    `Run.execute` raises."""
    world = World(seed=0)
    world.trace = trace
    run = Run(world, replace(plan))
    injected = Crashes(run, crashes)
    run.execute()
    return injected.all_happened, run.network.requests


def points(count: int, gang: bool, thaw: bool) -> Iterator[Crash]:
    """All crash points of a run with `count` operations. Of a gang that is lost permanently, only the store remains. It
    is the same after an operation and before the next one, so these are one point."""
    is_lost = gang and not thaw
    for number in range(count):
        for when in ("before",) if is_lost and number < count - 1 else ("before", "after"):
            yield Crash(number, when, gang, thaw)
