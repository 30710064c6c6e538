"""A world with a simulated clock and scheduler, whose threads run one at a time, in an order that a seed determines.

The same seed gives the same run. Exactly one actor runs at any moment. It yields only when it sleeps or waits. The
clock moves to the next wake-up time. No real sleep happens.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

START = 1_790_000_000.0  # Unix seconds at which every world begins


class Killed(BaseException):
    """The process of an actor is dead. Handlers of ordinary errors do not catch this."""


class StuckError(AssertionError):
    """No actor can ever run again, or the run exceeded all limits."""


@dataclass(eq=False)
class Process:
    """A process that can die or freeze, on one node."""

    name: str
    node: str = "node"
    dead: bool = False
    frozen: bool = False
    skew: float = 0.0  # seconds that its clock is ahead of the world's
    lies: float = 0.0  # probability that a read has a flipped bit
    role: Any = None  # of the scenario


@dataclass(eq=False)
class Actor:
    """A thread of a process in the world."""

    name: str
    process: Process
    wake: float
    order: int  # among actors that wake at the same moment
    waits_for: Callable[[], bool] | None = None
    done: bool = False
    baton: threading.Lock = field(default_factory=threading.Lock)


class _Worker:
    """A real thread that runs one actor after another. A new thread per actor would cost more than the actor's work."""

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.work: Callable[[], None] = lambda: None
        self.turn = threading.Lock()
        self.turn.acquire()
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            self.work()


def _in_thread(work: Callable[[], None]) -> None:
    worker = _Worker.idle.pop() if _Worker.idle else _Worker()

    def work_and_rest() -> None:
        work()
        _Worker.idle.append(worker)

    worker.work = work_and_rest
    worker.turn.release()


class World:
    """Actors, their clock, and the scheduler."""

    def __init__(self, seed: int, most_moves: int = 200_000) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.moves = 0
        self.uninterrupted = False  # set during checks that must not be interrupted: new threads are not actors
        self.trace: list[str] | None = None  # a list to record the trace in
        self.failure: BaseException | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self._most_moves = most_moves
        self._actors: list[Actor] = []
        self._current: Actor | None = None
        self._orders = 0
        self._end = threading.Lock()
        self._end.acquire()

    @property
    def actor(self) -> Actor:
        """The running actor."""
        assert self._current is not None
        return self._current

    @property
    def process(self) -> Process:
        """The process of the running actor."""
        return self.actor.process

    @property
    def digest(self) -> str:
        """The digest of all notes so far. Two runs of one seed have the same digest."""
        return self._digest.hexdigest()

    def note(self, text: str) -> None:
        """Record a line about an event."""
        line = f"{self.now - START:12.4f} {text}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def clock(self) -> float:
        """The time of day of the current process, in Unix seconds."""
        return self.now + (self._current.process.skew if self._current is not None else 0.0)

    def monotonic(self) -> float:
        """A clock that is never set, in seconds."""
        return self.now - START

    def spawn(self, name: str, function: Callable[[], None], process: Process | None = None) -> Actor:
        """Start another thread of `process` (default: the current one). It begins when the scheduler selects it."""
        process = process or self.process
        self._orders += 1
        actor = Actor(name, process, self.now, self._orders)
        actor.baton.acquire()
        self._actors.append(actor)
        _in_thread(lambda: self._run(actor, function))
        return actor

    def run(self) -> None:
        """Run the actors until all are done. Raises the failure of one of them."""
        self._pass_on(None)
        self._end.acquire()
        if self.failure is not None:
            raise self.failure

    def sleep(self, seconds: float) -> None:
        """Let other actors run for this time. Raises Killed once the process is dead."""
        actor = self.actor
        actor.wake = self.now + max(seconds, 0.0)
        self._orders += 1
        actor.order = self._orders
        self._yield(actor)

    def wait(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Let other actors run until `condition` is true, or until the timeout. Returns whether it is true."""
        actor = self.actor
        if condition():
            return True
        actor.waits_for, actor.wake = condition, self.now + seconds
        self._yield(actor)
        return condition()

    def kill(self, process: Process) -> None:
        """Stop all threads of this process where they are, and start no more."""
        process.dead, process.frozen = True, False

    def alive(self, process: Process) -> bool:
        """Whether a process has any thread left."""
        return not process.dead and any(actor.process is process and not actor.done for actor in self._actors)

    def _run(self, actor: Actor, function: Callable[[], None]) -> None:
        actor.baton.acquire()
        try:
            if self.failure is None and not actor.process.dead:
                function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - passed to the code that runs the world
            if self.failure is None:
                self.failure = error
        actor.done = True
        self._actors.remove(actor)
        self._pass_on(actor)

    def _yield(self, actor: Actor) -> None:
        self._pass_on(actor)
        actor.waits_for = None
        if self.failure is not None or actor.process.dead:
            raise Killed

    def _pass_on(self, actor: Actor | None) -> None:
        """Give the baton to the next actor. Returns when `actor` has it again (never, after its end)."""
        following = self._next()
        self._current = following
        if following is actor and actor is not None:
            return
        (self._end if following is None else following.baton).release()
        if actor is not None and not actor.done:
            actor.baton.acquire()

    def _next(self) -> Actor | None:
        if not self._actors:
            return None
        self.moves += 1
        if self.moves > self._most_moves and self.failure is None:
            self.failure = StuckError(f"no end after {self._most_moves} moves")
        if self.failure is not None:
            return self._actors[0]
        best: Actor | None = None
        for actor in self._actors:
            if actor.process.dead:
                return actor  # it only unwinds its stack
            if actor.process.frozen:
                continue
            if actor.waits_for is not None and actor.wake > self.now and actor.waits_for():
                actor.wake, actor.waits_for = self.now, None
            if best is None or (actor.wake, actor.order) < (best.wake, best.order):
                best = actor
        if best is None or best.wake == math.inf:
            names = ", ".join(f"{actor.name}{' (frozen)' if actor.process.frozen else ''}" for actor in self._actors)
            self.failure = StuckError(f"no actor can run any more: {names}")
            return self._actors[0]
        self.now = max(self.now, best.wake)
        return best
