"""Attempts: each gang that forms claims the next number. Only the newest number of the newest launch may commit.

Rank 0 claims after the ranks have met. It does so for every kind of start: a launcher, torchrun after a change of its
members, a requeue by Slurm, a restart by Volcano. The claim is a put-if-absent, so two gangs never hold one number. A
gang that was replaced stops with FencedError and must not come back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from holdfast.spec.errors import FencedError
from holdfast.store import Store, layout
from holdfast.store.sequence import read_record, records, take_next


class _Claim(BaseModel):
    """The common fields of every stored claim."""

    claimed: float
    launch: int = Field(0, ge=0)
    world_size: int = Field(1, ge=0)
    plan: dict[str, Any] = {}
    fingerprint: str = ""


@dataclass(frozen=True)
class Attempt:
    """A claimed attempt: the fencing token of one gang."""

    run_id: str
    number: int
    launch: int = 0  # the launch that started its ranks; 0 without a launcher

    def check(self, store: Store) -> None:
        """Raises FencedError if a newer launch has begun, or a newer gang of this launch has claimed the run. A gang of
        an older launch that forms late takes a higher number, and replaces no other gang."""
        _require_newest_launch(store, self.run_id, self.launch)
        for number, _ in records(store, layout.attempts(self.run_id), after=self.number):
            if number > self.number and read_attempt(store, self.run_id, number).get("launch", 0) >= self.launch:
                raise FencedError(
                    f"run {self.run_id}: attempt {self.number} was replaced by attempt {number}; "
                    "it stops here, and the newer one continues"
                )


def list_attempts(store: Store, run_id: str, after: int = 0) -> list[tuple[int, float]]:
    """The numbers of all attempts above `after` and the time of each claim (Unix seconds), oldest first."""
    return records(store, layout.attempts(run_id), after)


def claim_attempt(
    store: Store,
    run_id: str,
    *,
    launch: int = 0,
    world_size: int = 1,
    plan: Mapping[str, Any] | None = None,
    fingerprint: str = "",
) -> Attempt:
    """Claim the next attempt of a run, which fences off older ones. `plan` and its `fingerprint` describe how this gang
    computes. Raises FencedError when a newer launch has begun."""
    _require_newest_launch(store, run_id, launch)
    claim = {"launch": launch, "world_size": world_size, "plan": dict(plan or {}), "fingerprint": fingerprint}
    return Attempt(run_id, take_next(store, layout.attempts(run_id), claim), launch)


def read_attempt(store: Store, run_id: str, number: int) -> dict[str, Any]:
    """The stored claim of an attempt. Raises MissingError, and BadReaderError for an invalid claim, since it may be the
    fence."""
    return read_record(store, layout.attempts(run_id), number, _Claim)


def attempt_began(store: Store, run_id: str, number: int) -> float:
    """When an attempt was claimed, in Unix seconds by the claimer's clock."""
    return float(read_attempt(store, run_id, number)["claimed"])


def _require_newest_launch(store: Store, run_id: str, launch: int) -> None:
    """Raises FencedError if a newer launch has begun. A gang without a launcher has no launch to check."""
    newer = records(store, layout.launches(run_id), after=launch) if launch > 0 else []
    if other := max((number for number, _ in newer), default=0):
        raise FencedError(f"run {run_id}: launch {launch} was replaced by launch {other}; it stops here")
