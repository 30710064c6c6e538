"""Page of a training as a file on this machine, rewritten while it runs: `holdfast report`."""

import os
import time
from pathlib import Path

from holdfast.pages import draw_training
from holdfast.spec import Spec
from holdfast.spec.errors import MissingError
from holdfast.store import Store
from holdfast.telemetry import Event
from holdfast.telemetry.event_folding import MOST, condense
from holdfast.telemetry.event_log import StoreEvents
from holdfast.telemetry.history import HistoryFollower
from holdfast.telemetry.ledger import is_active

AGAIN = 5  # seconds after which a browser reloads it


class TrainingPage:
    """The page of one run at `path`. A reader always finds the whole page.

    Rewriting it reads only new data, and gives the same page as a complete read.
    """

    def __init__(self, spec: Spec, run_id: str, store: Store, path: Path) -> None:
        self.path = path.absolute()
        self._spec, self._run_id, self._store = spec, run_id, store
        self._stored_events, self._history = StoreEvents(store, run_id), HistoryFollower(store, run_id)
        self._events: list[Event] = []

    @property
    def is_active(self) -> bool:
        """Whether the training was active at the last write."""
        return is_active(self._events)

    def write(self, *, follow: bool) -> None:
        """Write the current data. Raises MissingError for a path that cannot be written.

        `follow`: it is rewritten while the training runs, so the browser must reload it.
        """
        self._events += self._stored_events.new()
        while len(self._events) > MOST and len(condensed := condense(self._events)) < len(self._events):
            self._events = condensed
        now = time.time() if self.is_active else None
        reload_seconds = AGAIN if follow and self.is_active else None
        html = draw_training(
            self._spec, self._run_id, self._store, self._events, now, reload_seconds, history=self._history.read()
        )
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(html, encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            raise MissingError(f"{self.path}: cannot be written: {error.strerror}; give another --output") from None
