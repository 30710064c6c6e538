"""Condensing of events: of a long run, a reader keeps a bounded number in memory.

Two kinds are emitted continuously: how each rank spent its time, and the progress of the training. When more than MOST
events are in memory, neighbors of these kinds are merged: times of a rank are added, and of two progress reports the
later one stays. All other events stay as they are. A ledger or a cost of condensed events has the same sums. Only the
position of a second within a merged stretch is lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from holdfast.telemetry.events import Event, PhaseProgress, Progress, TimeSpent

MOST = 20_000  # events in memory: some 50 MB


def condense(events: Sequence[Event]) -> list[Event]:
    """The same events, in their order, with about half as many of the continuous kinds."""
    kept: dict[int, Event] = {}
    open_at: dict[Hashable, int] = {}  # of each stream: the index of an event that has no partner yet
    newest: dict[Hashable, int] = {index_key: index for index, event in enumerate(events) if (index_key := _key(event))}
    for index, event in enumerate(events):
        kept[index] = event
        if (key := _key(event)) is None:
            continue
        before = open_at.pop(key, None)
        if before is None:
            open_at[key] = index
        elif (merged := _merged(kept[before], event)) is not None and newest[key] != before:
            del kept[before]
            kept[index] = merged
        else:
            open_at[key] = index
    return list(kept.values())


def _key(event: Event) -> Hashable | None:
    """The stream that an event belongs to; None for an event that stays."""
    if isinstance(event, TimeSpent):
        return event.kind, event.writer, event.attempt, event.rank
    if isinstance(event, Progress | PhaseProgress):
        return event.kind, event.writer, event.attempt
    return None


def _merged(one: Event, other: Event) -> Event | None:
    """The merge of two neighbors of a stream; None where they cannot be merged."""
    if not isinstance(one, TimeSpent) or not isinstance(other, TimeSpent):
        return other
    metered = (one.joules is None, one.utilisation is None) == (other.joules is None, other.utilisation is None)
    if one.last or one.failed or not metered:
        return None
    seconds = dict(one.seconds)
    for name, spent in other.seconds.items():
        seconds[name] = seconds.get(name, 0.0) + spent
    update: dict[str, object] = {"seconds": seconds, "peak_memory": max(one.peak_memory, other.peak_memory)}
    if one.joules is not None and other.joules is not None:
        update["joules"] = one.joules + other.joules
    if one.utilisation is not None and other.utilisation is not None:
        shares = sum(one.seconds.values()), sum(other.seconds.values())
        whole = sum(shares) or 2.0
        weights = shares if sum(shares) else (1.0, 1.0)
        update["utilisation"] = (one.utilisation * weights[0] + other.utilisation * weights[1]) / whole
    return other.model_copy(update=update)
