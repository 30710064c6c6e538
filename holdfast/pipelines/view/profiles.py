"""Wait for a requested profile."""

from __future__ import annotations

import time

from holdfast.spec.errors import MissingError
from holdfast.store import Store
from holdfast.telemetry.event_log import StoreEvents
from holdfast.telemetry.events import AttemptBegan, LaunchBegan, LaunchEnded, ProfileSaved, WarningIssued

POLL_SECONDS = 1.0
SILENT_SECONDS = 900.0  # without events before giving up; first steps may compile


def wait_for_trace(store: Store, run_id: str, begun: float, silent: float = SILENT_SECONDS) -> str:
    """The key of the first trace that is reported after `begun` (unix seconds).

    Raises MissingError when the run reports a failure or has ended. Also raises it after `silent` seconds without
    events, because then no process of the run may be left.
    """
    events = StoreEvents(store, run_id)
    last_event, ended = time.monotonic(), False
    while True:
        for event in events.new():
            last_event = time.monotonic()
            if isinstance(event, LaunchBegan | AttemptBegan):
                ended = False
            elif isinstance(event, LaunchEnded) and event.restart_in is None:
                ended = True
            if event.time < begun:
                continue
            if isinstance(event, ProfileSaved):
                return event.key
            if isinstance(event, WarningIssued) and "profile" in event.message:
                raise MissingError(event.message)
        if ended:
            raise MissingError(f"run {run_id} has ended without it; the request waits for its next launch")
        if time.monotonic() - last_event > silent:
            raise MissingError(
                f"run {run_id} has reported nothing for {silent:.0f} s; the request stays, and `holdfast show "
                f"{run_id[:8]}` says whether it still trains"
            )
        time.sleep(POLL_SECONDS)
