"""Training progress of a run, from its events in the store; identical on every backend."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.store import Store
from holdfast.telemetry.event_log import newest_objects
from holdfast.telemetry.events import Progress


@dataclass(frozen=True)
class Reached:
    """The newest progress that the ranks reported."""

    step: int
    steps: int
    loss: float | None  # nats per token
    tokens_per_second: float | None  # None for a script
    seconds_left: float
    time: float  # of the report, in unix seconds
    text: str


def reached(store: Store, run_id: str) -> Reached | None:
    """The newest reported step of a run; None before the first. Reads only the newest events."""
    for events in newest_objects(store, run_id):
        if reports := [event for event in events if isinstance(event, Progress)]:
            newest = max(reports, key=lambda event: (event.time, event.step))
            return Reached(
                newest.step,
                newest.steps,
                newest.loss,
                newest.tokens_per_second,
                newest.seconds_left,
                newest.time,
                newest.text,
            )
    return None
