"""The gang of simulated ranks: the interface of `collectives.Gang`, over the scheduler instead of gloo."""

from typing import Any, TypeVar

from holdfast.collectives import Gang
from holdfast.spec.errors import LostPeerError
from tests.protocol.world import Process, World

T = TypeVar("T")


class Meeting:
    """The meeting point of the ranks of one gang."""

    def __init__(self, world: World, processes: list[Process]) -> None:
        self.world, self.processes = world, processes
        self.given: list[dict[int, Any]] = []  # per collective, by rank
        self.left: set[int] = set()  # ranks that ended


class SimulatedGang(Gang):
    """`rank` of the gang of that meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, len(meeting.processes)
        self._meeting, self._calls = meeting, 0

    def broadcast(self, value: T, kind: Any = None, source: int = 0) -> T:
        """The value of rank 0."""
        return self.all_gather(value)[source]

    def all_gather(self, value: T, kind: Any = None) -> list[T]:
        """The value of every rank. Raises LostPeerError when a rank ends before it has given a value."""
        meeting, number = self._meeting, self._calls
        self._calls += 1
        while len(meeting.given) <= number:
            meeting.given.append({})
        values = meeting.given[number]
        values[self.rank] = value

        def lost() -> list[int]:
            ended_ranks = [
                rank for rank, process in enumerate(meeting.processes) if process.dead or rank in meeting.left
            ]
            return [rank for rank in ended_ranks if rank not in values]

        meeting.world.wait(lambda: len(values) == self.size or bool(lost()))
        if len(values) < self.size:
            raise LostPeerError(f"another rank went away: {lost()}")
        return [values[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_gather(None)
