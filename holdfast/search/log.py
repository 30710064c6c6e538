"""Log of a search: its decisions and the scores that they depend on, as `sweeps/<search-id>/log/NNNNN.json`.

An entry is created once and never changes. Of two controllers that write the same entry, one wins. The other one reads
the entry of the winner and continues after it.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, field_validator

from holdfast.spec.errors import DataError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json

WHOLE = 0  # the budget of a trial that trains to its last step


class LogEntry(BaseModel, frozen=True, extra="forbid"):
    """A decision to train a trial up to a step, or the score of a trial at that step."""

    kind: Literal["decision", "score"]
    trial: int  # from 1
    until: int  # optimizer steps; WHOLE: to the last step
    changes: tuple[str, ...] = ()  # of a decision
    step: int = 0  # of a score: the checkpoint that was measured. A trial trained before may be beyond `until`
    loss: float | None = None  # of a score, held out, in nats per token; None: not finite, or the trial failed
    exit_code: int = 0  # of a score: that of the step that failed permanently
    failed_step: str = ""
    reason: str = ""

    @field_validator("loss")
    @classmethod
    def _is_finite(cls, loss: float | None) -> float | None:
        return loss if loss is not None and math.isfinite(loss) else None


LogEntries = Sequence[LogEntry]


def read_log(store: Store, search_id: str) -> list[LogEntry]:
    """The entries of a search, oldest first. Raises DataError for a missing or damaged entry."""
    prefix = layout.sweep(search_id, "log/")
    keys = sorted(info.key for info in store.list(prefix))
    for number, key in enumerate(keys):
        if key != _key(search_id, number):
            raise DataError(f"{_key(search_id, number)}: is missing in the log of the search; restore it")
    return [read_json(store, key, LogEntry) for key in keys]


def append(store: Store, search_id: str, number: int, entry: LogEntry) -> bool:
    """Write entry `number`, from 0. Returns whether this call created it; False if another one is there."""
    return store.put_if_absent(_key(search_id, number), entry.model_dump_json(indent=1).encode())


def decisions_of(entries: LogEntries) -> dict[tuple[int, int], LogEntry]:
    """The decisions by trial and budget."""
    return {(entry.trial, entry.until): entry for entry in entries if entry.kind == "decision"}


def scores_of(entries: LogEntries) -> dict[tuple[int, int], LogEntry]:
    """The scores by trial and budget."""
    return {(entry.trial, entry.until): entry for entry in entries if entry.kind == "score"}


def last_score(entries: LogEntries, trial: int) -> LogEntry | None:
    """The newest score of a trial."""
    return next((entry for entry in reversed(entries) if entry.kind == "score" and entry.trial == trial), None)


def pending(entries: LogEntries) -> LogEntry | None:
    """The first decision without a score."""
    scores = scores_of(entries)
    return next((entry for key, entry in decisions_of(entries).items() if key not in scores), None)


def trials_begun(entries: LogEntries) -> list[tuple[str, ...]]:
    """The overrides of the trials that began, by number."""
    begun = {entry.trial: entry.changes for entry in entries if entry.kind == "decision"}
    return [begun[trial] for trial in sorted(begun)]


class SearchLog:
    """The log of a search as its controller writes it."""

    def __init__(self, store: Store, search_id: str) -> None:
        self.id, self.entries, self._store = search_id, read_log(store, search_id), store

    def add(self, entry: LogEntry) -> bool:
        """Write the next entry. If another controller was faster, read its entries instead and return False."""
        entry = LogEntry.model_validate_json(entry.model_dump_json())  # as readers get it: NaN is None
        if created := append(self._store, self.id, len(self.entries), entry):
            self.entries.append(entry)
        else:
            self.entries = read_log(self._store, self.id)
        return created

    def changes_of(self, trial: int) -> tuple[str, ...]:
        """The overrides of a trial that has begun."""
        return trials_begun(self.entries)[trial - 1]

    def add_score(self, score: LogEntry) -> None:
        """Write a score, unless the log has one of the same trial and budget."""
        while (score.trial, score.until) not in scores_of(self.entries):
            self.add(score)


def _key(search_id: str, number: int) -> str:
    return layout.sweep(search_id, f"log/{number:05d}.json")
