"""Events of a node, emitted by the process that starts its ranks.

A store that cannot be opened or is unavailable ends no process, and the store is not opened before the first event.
`holdfast.telemetry.event_log` delivers events to the store.
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
    """`with NodeEvents(place) as events`: events that are emitted in the block are written by its end."""

    def __init__(self, place: Place | None = None) -> None:
        """`place` is the run that the events belong to. Without it, they go only to the pipe."""
        self._place, self._lock = place, threading.Lock()
        self._writer: EventWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def tell(self, event: Event) -> None:
        """Emit an event, from any thread. The first one opens the store, within 20 seconds. Raises nothing."""
        with self._lock, suppress(HoldfastError, OSError):
            if self._place is not None and self._writer is None:
                set_source("node", launch=self._place.launch)
                self._writer = EventWriter(open_store(self._place.store, deadline=DEADLINE), self._place.run_id)
        emit(event)
