"""Attempts: each gang that forms claims the next number, and only the newest number of the newest launch may commit.

Rank 0 claims after the ranks have met, whoever started them: a launcher, torchrun after a change of its members, a
requeue by Slurm, a restart by Volcano. The claim is a put-if-absent, so two gangs never hold one number. A gang that
finds itself replaced stops with FencedError and must not come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.components.spec.errors import FencedError
from holdfast.components.store import Store, layout
from holdfast.components.store.sequence import newest, read_record, records, take_next


@dataclass(frozen=True)
class Attempt:
    """A claimed attempt: the fencing token of one gang."""

    run_id: str
    number: int
    launch: int = 0  # that its ranks were started by; 0 where no launcher is

    def check(self, store: Store) -> None:
        """Raises FencedError if a newer launch has begun, or a newer gang of this launch has claimed the run. A gang of
        an older launch that forms late takes a higher number, and replaces nobody."""
        _require_newest_launch(store, self.run_id, self.launch)
        for number, _ in list_attempts(store, self.run_id):
            if number > self.number and read_attempt(store, self.run_id, number).get("launch", 0) >= self.launch:
                raise FencedError(
                    f"run {self.run_id}: attempt {self.number} was replaced by attempt {number}; "
                    "it stops here, and the newer one goes on"
                )


def list_attempts(store: Store, run_id: str) -> list[tuple[int, float]]:
    """The numbers of all attempts and when each was claimed (unix seconds), oldest first."""
    return records(store, layout.attempts(run_id))


def claim_attempt(
    store: Store,
    run_id: str,
    *,
    launch: int = 0,
    world_size: int = 1,
    plan: Mapping[str, Any] | None = None,
    fingerprint: str = "",
) -> Attempt:
    """Claim the next attempt of a run; older ones are fenced off from now on. `plan` and its `fingerprint` say how this
    gang computes. Raises FencedError when a newer launch has begun."""
    _require_newest_launch(store, run_id, launch)
    claim = {"launch": launch, "world_size": world_size, "plan": dict(plan or {}), "fingerprint": fingerprint}
    return Attempt(run_id, take_next(store, layout.attempts(run_id), claim), launch)


def read_attempt(store: Store, run_id: str, number: int) -> dict[str, Any]:
    """What was written down when an attempt was claimed."""
    return read_record(store, layout.attempts(run_id), number)


def attempt_began(store: Store, run_id: str, number: int) -> float:
    """When an attempt was claimed, in unix seconds by the claimer's clock."""
    return float(read_attempt(store, run_id, number)["claimed"])


def _require_newest_launch(store: Store, run_id: str, launch: int) -> None:
    if (other := newest(store, layout.launches(run_id))) > launch > 0:
        raise FencedError(f"run {run_id}: launch {launch} was replaced by launch {other}; it stops here")
