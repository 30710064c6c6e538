"""Attempts: each start of a run's gang claims the next number, and only the newest number may commit.

The claim is a put-if-absent, so two launchers can never hold the same number. A gang that finds a newer claim has been
replaced: it stops with FencedError and must not come back.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any

from holdfast.components.spec.errors import FencedError
from holdfast.components.store import Store, layout


@dataclass(frozen=True)
class Attempt:
    """A claimed attempt."""

    run_id: str
    number: int

    def check(self, store: Store) -> None:
        """Raises FencedError if a newer attempt has claimed the run."""
        newest = max((number for number, _ in list_attempts(store, self.run_id)), default=0)
        if newest > self.number:
            raise FencedError(
                f"run {self.run_id}: attempt {self.number} was replaced by attempt {newest}; "
                "it stops here, and the newer one goes on"
            )


def list_attempts(store: Store, run_id: str) -> list[tuple[int, float]]:
    """The numbers of all attempts and when each was claimed (unix seconds), oldest first."""
    infos = store.list(layout.run(run_id, "attempts/"))
    matches = (
        (re.search(r"/(\d{6,})\.json$", info.key), info) for info in infos
    )  # whatever else lies there is not ours
    return sorted((int(match[1]), info.modified) for match, info in matches if match)


def claim_attempt(store: Store, run_id: str, **details: Any) -> Attempt:
    """Claim the next attempt of a run; older ones are fenced off from now on. `details` are kept with the claim."""
    number = max((number for number, _ in list_attempts(store, run_id)), default=0) + 1
    claim: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "claimed": time.time(),
        "nonce": uuid.uuid4().hex,
    }
    claim |= details
    while not store.put_if_absent(layout.attempt(run_id, number), json.dumps(claim).encode()):
        number += 1
    return Attempt(run_id, number)


def read_attempt(store: Store, run_id: str, number: int) -> dict[str, Any]:
    """What was written down when an attempt was claimed."""
    claim: dict[str, Any] = json.loads(store.get(layout.attempt(run_id, number)))
    return claim


def attempt_began(store: Store, run_id: str, number: int) -> float:
    """When an attempt was claimed, in unix seconds by the claimer's clock."""
    return float(read_attempt(store, run_id, number)["claimed"])


def record_ending(store: Store, run_id: str, number: int, **ending: Any) -> None:
    """Write down how an attempt ended, for whoever starts the next one."""
    store.put(layout.ending(run_id, number), json.dumps(ending).encode())


def read_endings(store: Store, run_id: str) -> dict[int, dict[str, Any]]:
    """What was written down of the attempts that ended, by number. A launcher that died leaves a gap."""
    found = {}
    for info in store.list(layout.run(run_id, "attempts/")):
        if match := re.search(r"/(\d{6,})\.ending\.json$", info.key):
            found[int(match[1])] = json.loads(store.get(info.key))
    return found
