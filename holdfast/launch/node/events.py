"""What the process that starts the ranks of a node tells of them: events of the run that it trains.

Promises that a store which cannot be opened or is away ends nobody, and that nothing is opened before there is
something to tell; leaves how events reach the store to `holdfast.telemetry.event_log`.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Self

from holdfast.launch.node.output import DEADLINE, Place
from holdfast.spec.errors import HoldfastError
from holdfast.store import open_store
from holdfast.telemetry import emit
from holdfast.telemetry.channel import set_source
from holdfast.telemetry.event_log import EventWriter
from holdfast.telemetry.events import Event


class NodeEvents:
    """`with NodeEvents(place) as events`: what is told meanwhile is written by the end of it."""

    def __init__(self, place: Place | None = None) -> None:
        """`place`: the run whose events they are; without one they go to the pipe alone."""
        self._place, self._lock = place, threading.Lock()
        self._writer: EventWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def tell(self, event: Event) -> None:
        """Tell an event, from any thread. The first one opens the store, for 20 seconds at most; raises nothing."""
        with self._lock, suppress(HoldfastError, OSError):
            if self._place is not None and self._writer is None:
                set_source("node", launch=self._place.launch)
                self._writer = EventWriter(open_store(self._place.store, deadline=DEADLINE), self._place.run_id)
        emit(event)
