"""The standard library in a simulated world: clocks, threads, locks and names for production modules.

The modules under test keep their code. Only `time`, `threading`, `uuid` and similar modules are replaced while
`simulated` is active.
"""

from __future__ import annotations

import random
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.protocol.world import Actor, World


class Thread:
    """`threading.Thread`, as another actor of the same process."""

    def __init__(
        self,
        target: Callable[..., object] = lambda: None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        name: str = "thread",
        daemon: bool = True,
    ) -> None:
        self._world, self._name, self._done = _world(), name, False
        self._work = lambda: target(*args, **(kwargs or {}))

    def start(self) -> None:
        """Start the thread."""
        world = self._world
        world.spawn(f"{world.actor.name}'s {self._name}", self._run)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._world.wait(lambda: self._done, float("inf") if timeout is None else timeout)

    def is_alive(self) -> bool:
        """Whether it is still running."""
        return not self._done

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._done = True


class Condition:
    """`threading.Condition`, `Lock` and `RLock` in one. Only one actor runs at a time, so only a lock that is held
    during a wait is ever contended.
    """

    def __init__(self, lock: Any = None) -> None:
        self._world, self._depth, self._calls = _world(), 0, 0
        self._owner: Actor | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire the lock."""
        me = self._world.actor
        if self._owner is not me and self._owner is not None:
            if not blocking:
                return False
            self._world.wait(lambda: self._owner is None, float("inf") if timeout < 0 else timeout)
            if self._owner is not None:
                return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        """Release the lock."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = None

    def locked(self) -> bool:
        """Whether any thread holds it."""
        return self._owner is not None

    def __enter__(self) -> Condition:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification."""
        calls = self._calls
        return self._away(lambda: self._calls > calls, timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the predicate is true."""
        return bool(predicate()) or self._away(lambda: bool(predicate()), timeout)

    def notify(self, n: int = 1) -> None:
        """Wake the waiting threads."""
        self._calls += 1

    notify_all = notify

    def _away(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        depth, self._depth, self._owner = self._depth, 0, None
        is_true = self._world.wait(
            lambda: self._owner is None and condition(), float("inf") if timeout is None else timeout
        )
        self._world.wait(lambda: self._owner is None)
        self._owner, self._depth = self._world.actor, depth
        return is_true


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._world, self._set = _world(), False

    def set(self) -> None:
        """Set it."""
        self._set = True

    def clear(self) -> None:
        """Unset it."""
        self._set = False

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        return self._world.wait(lambda: self._set, float("inf") if timeout is None else timeout)


class Executor:
    """`ThreadPoolExecutor`, whose threads are actors."""

    def __init__(self, max_workers: int = 4, thread_name_prefix: str = "pool") -> None:
        self._workers, self._name = max_workers, thread_name_prefix

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """The results in the order of the items. The first failure is raised at its place."""
        waiting, results = list(enumerate(items)), dict[int, tuple[Any, Exception | None]]()
        count = len(waiting)
        if _world().uninterrupted or count == 1:
            yield from [work(item) for _, item in waiting]
            return

        def work_off() -> None:
            while waiting:
                number, item = waiting.pop(0)
                try:
                    results[number] = (work(item), None)
                except Exception as failure:  # noqa: BLE001 - raised when its result is requested
                    results[number] = (None, failure)

        threads = [Thread(work_off, name=f"{self._name} {number}") for number in range(min(self._workers, count))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(count):
            result, failure = results[number]
            if failure is not None:
                raise failure
            yield result


_worlds: list[World] = []


def _world() -> World:
    return _worlds[-1]


def _modules(world: World) -> dict[str, Any]:
    numbers = random.Random(world.random.random())
    return {
        "time": types.SimpleNamespace(
            time=world.clock, monotonic=world.monotonic, perf_counter=world.monotonic, sleep=world.sleep
        ),
        "threading": types.SimpleNamespace(
            Thread=Thread, Lock=Condition, RLock=Condition, Condition=Condition, Event=Event,
            get_ident=lambda: id(world.actor), current_thread=lambda: world.actor,
        ),
        "socket": types.SimpleNamespace(gethostname=lambda: world.process.node),
        "uuid": types.SimpleNamespace(uuid4=lambda: uuid.UUID(int=numbers.getrandbits(128), version=4)),
        "random": numbers,
        "ThreadPoolExecutor": Executor,
        "emit": lambda event: world.note(f"{world.process.name} says {event.kind}"),
        "log": _Silent(),
    }  # fmt: skip


class _Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def simulated(world: World, modules: Sequence[types.ModuleType], constants: dict[str, Any]) -> Iterator[None]:
    """Inside, the production modules see the clock, threads and names of `world`. Each of `constants` has a different
    value in every module that defines it.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    clocked: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
    names_of_world = {**_modules(world), **constants}
    _worlds.append(world)
    try:
        for names in [names for module in modules for names in _names_in(module)]:
            for name, value in names_of_world.items():
                if name in names:
                    replaced.append((names, name, names[name]))
                    names[name] = value
            for name, value in names.items():
                if value is time:  # a default argument that is a clock
                    replaced.append((names, name, value))
                    names[name] = names_of_world["time"]
        for function in [method for module in modules for method in _functions_in(module)]:
            if any(value is time for value in function.__defaults__ or ()):
                clocked.append((function, function.__defaults__ or ()))
                function.__defaults__ = tuple(
                    names_of_world["time"] if value is time else value for value in clocked[-1][1]
                )
        yield
    finally:
        _worlds.pop()
        for function, defaults in clocked:
            function.__defaults__ = defaults
        for names, name, value in reversed(replaced):
            names[name] = value


def _names_in(module: types.ModuleType) -> Iterator[dict[str, Any]]:
    """The names of a module, and the keyword defaults of its functions."""
    yield vars(module)
    for function in _functions_in(module):
        if function.__kwdefaults__:
            yield function.__kwdefaults__


def _functions_in(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for defined in list(vars(module).values()):
        if isinstance(defined, type) and defined.__module__ == module.__name__:
            yield from (attribute for attribute in vars(defined).values() if isinstance(attribute, types.FunctionType))
