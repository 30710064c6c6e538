"""Timeline of a run for `holdfast show`, one line per event."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from holdfast.telemetry.events import Event, SaveCommitted


def timeline(events: Sequence[Event]) -> Iterator[tuple[str, str, str]]:
    """Time, source and text of the notable `events` (in order), and at the end the latest progress.

    Consecutive saved checkpoints share one line.
    """
    saved: list[SaveCommitted] = []
    for event in events:
        if isinstance(event, SaveCommitted) and (not saved or event.attempt == saved[0].attempt):
            saved.append(event)
        elif event.notable:
            yield from _saves(saved)
            saved = [event] if isinstance(event, SaveCommitted) else []
            if not saved:
                yield _when(event), event.source, event.text
    yield from _saves(saved)
    spoken = [event for event in events if not event.silent]
    if spoken and not spoken[-1].notable:
        yield _when(spoken[-1]), spoken[-1].source, spoken[-1].text


def _saves(saved: Sequence[SaveCommitted]) -> Iterator[tuple[str, str, str]]:
    if len(saved) == 1:
        yield _when(saved[0]), saved[0].source, saved[0].text
    elif saved:
        waited = sum(event.stall_seconds for event in saved)
        text = (
            f"saved {len(saved)} checkpoints, steps {saved[0].step} to {saved[-1].step}; training waited {waited:.2f} s"
        )
        yield _when(saved[-1]), saved[-1].source, text


def _when(event: Event) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.time))
