"""A lease: at most one holder works at a time, and another one follows a holder that dies.

Clocks of two machines are never compared. The holder changes the record periodically. Another contender takes it over
after seeing it unchanged for LEASE_SECONDS by its own monotonic clock. It takes it over immediately when it is of a
newer attempt, whose claim has fenced the holder off. A holder that was frozen finds that its version of the record is
gone, and stops.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

from holdfast.checkpoint.commit import Clock
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.spec.json_parsing import parse_json
from holdfast.store import ConflictError, Store

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class _Record:
    """The lease as it is stored."""

    owner: str
    attempt: int
    held: bool


class LostLeaseError(HoldfastError):
    """Another holder has taken over."""


class Lease:
    """One contender for the lease at `key`."""

    def __init__(self, store: Store, key: str, attempt: int, clock: Clock) -> None:
        self._store, self._key, self._attempt, self._clock = store, key, attempt, clock
        self._owner, self._beat = uuid.uuid4().hex, 0
        self._version: str | None = None  # version of the record, while this contender holds it
        self._seen: tuple[str, float] | None = None  # the version of another's record, and since when

    def take(self) -> bool:
        """Try to become the holder."""
        try:
            data, version = self._store.get_versioned(self._key)
        except MissingError:
            data, version = b"{}", None
        if version is not None and not self._free(data) and not self._silent(version):
            return False
        try:
            self._version = self._swap(version, held=True)
        except ConflictError:
            return False
        self._seen = None
        return True

    def renew(self) -> None:
        """Record that the holder is at work. Raises LostLeaseError when it is not the holder any more."""
        try:
            self._version = self._swap(self._version, held=True)
        except ConflictError:
            raise LostLeaseError(f"{self._key}: another collector has taken over") from None

    def release(self) -> None:
        """Let another contender begin immediately. Raises LostLeaseError as `renew`."""
        try:
            self._swap(self._version, held=False)
        except ConflictError:
            raise LostLeaseError(f"{self._key}: another collector has taken over") from None

    def _free(self, data: bytes) -> bool:
        """Whether a record blocks no contender: released, of an older attempt, this one's own, or torn."""
        try:
            told = parse_json(data, _Record, self._key)
        except DataError:
            return True
        return not told.held or told.attempt < self._attempt or told.owner == self._owner

    def _silent(self, version: str) -> bool:
        now = self._clock.monotonic()
        if self._seen is None or self._seen[0] != version:
            self._seen = version, now
        return now - self._seen[1] >= LEASE_SECONDS

    def _swap(self, expected: str | None, *, held: bool) -> str:
        self._beat += 1
        told = {"owner": self._owner, "attempt": self._attempt, "beat": self._beat, "held": held}
        return self._store.compare_and_swap(self._key, json.dumps(told).encode(), expected)
