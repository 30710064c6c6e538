"""How far the training of a run is, from its own events in the store: the same on every backend."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.store import Store
from holdfast.telemetry.event_log import newest_objects
from holdfast.telemetry.events import Progress


@dataclass(frozen=True)
class Reached:
    """What the ranks told last."""

    step: int
    steps: int
    loss: float | None  # nats a token
    tokens_per_second: float
    seconds_left: float
    time: float  # when they told it, in unix seconds
    text: str


def reached(store: Store, run_id: str) -> Reached | None:
    """The newest step that the ranks of a run told; None before the first. Reads the newest events only."""
    for events in newest_objects(store, run_id):
        if told := [event for event in events if isinstance(event, Progress)]:
            last = max(told, key=lambda event: (event.time, event.step))
            return Reached(
                last.step, last.steps, last.loss, last.tokens_per_second, last.seconds_left, last.time, last.text
            )
    return None
