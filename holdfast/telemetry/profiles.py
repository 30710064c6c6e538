"""Requests for a profile of some steps of a running training, through an object in the run's folder.

A request changes no bit of the training, and is served once: rank 0 removes it when it begins, regardless of the
result. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from holdfast.spec.errors import DataError, MissingError, Problem, SpecError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json

MOST_STEPS = 100  # limit of one profile: each step is some hundred KB of events, in memory until the last one is done
REQUEST = "profiles/request.json"


@dataclass(frozen=True)
class Window:
    """The steps from `first` to `last`, inclusive; `first` 0 begins with the next one."""

    first: int
    last: int

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.last - self.first + 1

    @classmethod
    def of(cls, text: str) -> Window:
        """Parse `100-110`, or `10` for the next ten. Raises SpecError."""
        first, dash, last = text.partition("-")
        try:
            window = cls(int(first), int(last)) if dash else cls(0, int(first) - 1)
        except ValueError:
            window = cls(1, 0)
        if not 1 <= window.steps <= MOST_STEPS or (dash and window.first < 1):
            remedy = f"write --steps 100-110, or --steps 10 for the next ten; {MOST_STEPS} at most"
            raise SpecError([Problem("--steps", text, "is no window of steps", remedy)])
        return window


def ask(store: Store, run_id: str, window: Window) -> None:
    """Request a profile. It replaces an earlier, unserved request."""
    store.put(layout.run(run_id, REQUEST), json.dumps({"first": window.first, "last": window.last}).encode())


def pending_request(store: Store, run_id: str) -> Window | None:
    """The pending request; None without a readable one."""
    try:
        return read_json(store, layout.run(run_id, REQUEST), Window)
    except (MissingError, DataError):
        return None


def clear_request(store: Store, run_id: str) -> None:
    """Remove the request."""
    store.delete(layout.run(run_id, REQUEST))


def trace_key(run_id: str, attempt: int, first: int, last: int) -> str:
    """The key of the trace of some steps, as computed by an attempt."""
    return layout.run(run_id, f"profiles/{first:09d}-{last:09d}.{attempt:06d}.trace.json.gz")
