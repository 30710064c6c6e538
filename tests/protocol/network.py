"""The network to the store in a simulated world: slow, lossy and sometimes late.

A request can be lost, or be refused for a moment (503, 409). It can be applied and lose its reply, or be applied long
after its sender gave up. Only the write of a root is never applied after its sender gave up, because that could restore
a collected checkpoint. Like real stores, a connection retries until its deadline. It checks whether an earlier try of a
conditional write was applied. Then it raises StoreUnreachableError.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from holdfast.spec.errors import HoldfastError, StoreUnreachableError
from tests.protocol.bucket import Bucket, MemoryStore
from tests.protocol.world import Process, World

T = TypeVar("T")

CHANGES = ("put", "put_if_absent", "compare_and_swap", "delete")


@dataclass
class Weather:
    """The probability of each fault per request. Times are in seconds."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0
    refused: float = 0.0
    latency: tuple[float, float] = (0.002, 0.05)  # from, to; uniform on a logarithmic scale
    stall: float = 0.0  # probability that a request takes a hundred times as long
    timeout: float = 5.0
    deadline: float = 30.0
    outages: list[tuple[float, float]] = field(default_factory=list)  # from, to: the store is unreachable

    def calmed(self) -> Weather:
        """The same settings without faults."""
        return replace(self, lost_request=0.0, lost_reply=0.0, late=0.0, refused=0.0, stall=0.0, outages=[])


class Network:
    """All connections of a world, and their requests in flight."""

    def __init__(self, world: World, bucket: Bucket, weather: Weather) -> None:
        self.world, self.bucket, self.weather = world, bucket, weather
        self.requests = 0  # requests that reached the bucket or were lost
        self.on_request: Callable[[int, str, str, str, Process], None] | None = None  # see `Connection._request`
        self.looked: dict[Process, float] = {}  # the time of each process's last listing of attempts
        self._process = Process("network")
        self.under_way = 0  # late requests without a waiting sender

    def connect(self, process: Process) -> Connection:
        """The store as a process sees it."""
        return Connection(self, process)

    def later(self, effect: Callable[[], Any]) -> None:
        """Apply a request whose sender gets no reply."""
        delay = self.world.random.uniform(1.0, 30.0) * self.world.random.choice((1, 1, 20))
        self.under_way += 1

        def apply() -> None:
            self.world.sleep(delay)
            self.under_way -= 1
            self.world.note("a late request arrives")
            with suppress(HoldfastError):
                effect()

        self.world.spawn("late request", apply, self._process)


class Connection(MemoryStore):
    """A store over the network of a world."""

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network.bucket, page=7)
        self._network, self._world, self._process = network, network.world, process

    def _request(self, operation: str, key: str, effect: Callable[[], T], again: Callable[[], T] | None = None) -> T:
        """See `MemoryStore`. `Network.on_request(number, "before" or "after", operation, key, process)` is called
        around each effect and may kill the process.
        """
        world, network, random = self._world, self._network, self._world.random
        weather, start, tries = network.weather, world.now, 0
        changes = operation in CHANGES
        while True:
            tries += 1
            action = effect if tries == 1 or again is None else again
            world.sleep(self._latency())
            number = network.requests
            network.requests += 1
            fault = self._fault(changes, may_be_late=changes and "/checkpoints/step-" not in key)
            self._heed(number, "before", operation, key)
            if fault == "":
                outcome = self._applied(number, operation, key, action)
                world.sleep(self._latency())
                return outcome
            world.note(f"{self._process.name} {operation} {key}: {fault}")
            if fault == "lost reply":
                with suppress(HoldfastError):
                    self._applied(number, operation, key, action)
            elif fault == "late":
                network.later(action)
            world.sleep(0.01 if fault == "refused" else weather.timeout)
            if world.now - start > weather.deadline:
                raise StoreUnreachableError(f"{operation} {key}: no success within {weather.deadline:g} s: {fault}")
            world.sleep(random.uniform(0.05, 0.1) * 2 ** min(tries, 6))

    def _applied(self, number: int, operation: str, key: str, action: Callable[[], T]) -> T:
        if operation in CHANGES:
            self._world.note(f"{self._process.name} {operation} {key}")
        elif operation == "list" and key.endswith("/attempts/"):
            self._network.looked[self._process] = self._world.now
        try:
            return action()
        finally:
            self._heed(number, "after", operation, key)

    def _heed(self, number: int, when: str, operation: str, key: str) -> None:
        if self._network.on_request is not None:
            self._network.on_request(number, when, operation, key, self._process)
            if self._process.dead or self._process.frozen:
                self._world.sleep(0.0)  # does not return, or not now

    def _fault(self, changes: bool, may_be_late: bool) -> str:
        weather, world = self._network.weather, self._world
        if any(begin <= world.now < end for begin, end in weather.outages):
            return "lost request"
        roll = world.random.random()
        for name, chance in (
            ("lost request", weather.lost_request),
            ("refused", weather.refused),
            ("lost reply", weather.lost_reply if changes else 0.0),
            ("late", weather.late if may_be_late else 0.0),
        ):
            if roll < chance:
                return name
            roll -= chance
        return ""

    def _latency(self) -> float:
        weather, random = self._network.weather, self._world.random
        low, high = weather.latency
        seconds = low * (high / low) ** random.random()
        return seconds * (100.0 if weather.stall and random.random() < weather.stall else 1.0)

    def _order(self, count: int) -> list[int]:
        return self._world.random.sample(range(count), count)

    def _read(self, key: str, start: int, data: bytes) -> bytes:
        random = self._world.random
        if not data or not self._process.lies or random.random() >= self._process.lies:
            return data
        wrong = bytearray(data)
        wrong[random.randrange(len(data))] ^= 1 << random.randrange(8)
        self._world.note(f"{self._process.name} reads a flipped bit of {key}")
        return bytes(wrong)
