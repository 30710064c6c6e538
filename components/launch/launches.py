"""Launches: each start of a run's gang by a launcher, with what the ranks are told and how it ended.

A launch is not an attempt: a gang that forms again within a launch (torchrun's membership restart, a requeue, a restart
by an operator) starts the same command again and claims an attempt of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from holdfast.components.store import Store, layout
from holdfast.components.store.sequence import newest, read_record, take_next


def claim_launch(store: Store, run_id: str, assignment: Mapping[str, Any], *, replan: bool = False) -> int:
    """Take the number of the next launch. `assignment` is what the ranks read; with `replan` a person allows them to
    compute it another way than the attempts before. Gangs of older launches are fenced off from now on."""
    return take_next(store, layout.launches(run_id), {"assignment": assignment, "replan": replan})


def newest_launch(store: Store, run_id: str) -> int:
    """The number of the newest launch; 0 if the run was never launched."""
    return newest(store, layout.launches(run_id))


def read_launch(store: Store, run_id: str, number: int) -> dict[str, Any]:
    """What was written down for a launch. Raises MissingError."""
    return read_record(store, layout.launches(run_id), number)


def record_ending(store: Store, run_id: str, number: int, ending: Mapping[str, Any]) -> None:
    """Write down how a launch ended, for whoever starts the next one."""
    store.put(layout.ending(run_id, number), json.dumps(ending).encode())


def read_endings(store: Store, run_id: str) -> dict[int, dict[str, Any]]:
    """What was written down of the launches that ended, by number. A launcher that died leaves a gap."""
    found = {}
    for info in store.list(layout.launches(run_id)):
        if match := re.search(r"/(\d{6,})\.ending\.json$", info.key):
            found[int(match[1])] = json.loads(store.get(info.key))
    return found
