"""The ledger of a disturbed run accounts for every second of every rank exactly once."""

from collections.abc import Sequence

import pytest

from holdfast.telemetry.events import Event, LaunchEnded, StepBegan
from holdfast.telemetry.ledger import ledger


def require_whole_ledger(events: Sequence[Event], ranks: int) -> None:
    """The classes of each rank add up to the run's duration, without the time between a permanent end and the next
    start. Each rank has computed.
    """
    wall, begun = 0.0, 0.0
    for event in events:
        if isinstance(event, StepBegan) and event.name == "train":
            begun = begun or event.time
        elif isinstance(event, LaunchEnded) and event.restart_in is None:
            wall, begun = wall + event.time - begun, 0.0
    accounts = ledger(events)
    assert accounts.wall == pytest.approx(wall, rel=0.01)
    assert sorted(accounts.ranks) == list(range(ranks))
    for seconds in accounts.ranks.values():
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
        assert seconds["productive"] > 0
        assert seconds["start"] > 0
