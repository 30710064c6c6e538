"""Launches: each start of a run's gang by a launcher, with what the ranks are told and how it ended.

A launch is not an attempt: a gang that forms again within a launch (torchrun's membership restart, a requeue, a restart
by an operator) starts the same command again and claims an attempt of its own.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic import BaseModel, FiniteFloat

from holdfast.launch.node.spot_notice import RECENT, reclaims
from holdfast.spec.cluster import Cluster
from holdfast.spec.errors import DataError, ExitCode, MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json
from holdfast.store.parallel import in_parallel
from holdfast.store.sequence import newest, read_record, record_key, take_next
from holdfast.telemetry import read_events
from holdfast.telemetry.events import Event, StragglerDetected

log = logging.getLogger("holdfast.launch")

UNHEALTHY_SECONDS = 86_400.0  # that a failed health check keeps its node out of a run: it may have been mended since
SLOW_SECONDS = 7 * 86_400.0  # that a slow rank keeps its node out of a run
ENDINGS = 100  # launches of which the next one looks at how they ended
BLAMES_TO_EXCLUDE = 2  # launches that a node may spoil before the next ones avoid it


class LaunchEnding(BaseModel):
    """How a launch ended, as it is stored."""

    code: int | None = None
    detail: str = ""
    blamed_nodes: tuple[str, ...] = ()
    ended: FiniteFloat | None = None  # unix seconds
    next_plan: dict[str, Any] | None = None  # the layout that needs less memory, where it ran out of it; null for none


def claim_launch(store: Store, run_id: str, assignment: Mapping[str, Any], *, replan: bool = False) -> int:
    """Take the number of the next launch. `assignment` is what the ranks read; with `replan` a person allows them to
    compute it another way than the attempts before. Gangs of older launches are fenced off from now on."""
    return take_next(store, layout.launches(run_id), {"assignment": assignment, "replan": replan})


def newest_launch(store: Store, run_id: str) -> int:
    """The number of the newest launch; 0 if the run was never launched."""
    return newest(store, layout.launches(run_id))


def read_launch(store: Store, run_id: str, number: int) -> dict[str, Any]:
    """What was written down for a launch. Raises MissingError, and BadReaderError for what is not whole."""
    return read_record(store, layout.launches(run_id), number)


def record_ending(store: Store, run_id: str, number: int, ending: Mapping[str, Any]) -> None:
    """Write down how a launch ended, for whoever starts the next one."""
    store.put(layout.ending(run_id, number), json.dumps(ending).encode())


def read_ending(store: Store, run_id: str, number: int) -> dict[str, Any] | None:
    """What was written down of the end of a launch; None where it has not ended, or its launcher died, or the record is
    damaged: then how it ended is not known, and the next launch starts without that."""
    key = layout.ending(run_id, number)
    try:
        return read_json(store, key, LaunchEnding, "it is left out").model_dump(exclude_unset=True)
    except MissingError:
        return None
    except DataError as error:
        log.warning("%s", error)
        return None


def read_endings(store: Store, run_id: str, last: int = ENDINGS) -> dict[int, dict[str, Any]]:
    """What was written down of those of the `last` launches that ended, by number. Older ones are neither listed nor
    read: a launch does not take longer because the run was launched ten thousand times."""
    numbers = _ended(store, run_id, last)
    endings = in_parallel(lambda number: read_ending(store, run_id, number), numbers)
    return {number: ending for number, ending in zip(numbers, endings, strict=True) if ending is not None}


def nodes_of_the_last_end(store: Store, run_id: str) -> tuple[str, ...]:
    """The nodes that the launch which ended last blames for it."""
    newest_first = reversed(_ended(store, run_id, ENDINGS))
    found = (ending for number in newest_first if (ending := read_ending(store, run_id, number)) is not None)
    return tuple(next(found, {}).get("blamed_nodes", ()))


def _ended(store: Store, run_id: str, last: int) -> list[int]:
    """The numbers of those of the `last` launches that ended, lowest first."""
    folder = layout.launches(run_id)
    before = max(0, newest(store, folder) - last)
    listed = store.list(folder, record_key(folder, before) if before else "")
    matches = (re.search(r"/(\d{6,})\.ending\.json$", info.key) for info in listed)
    return sorted(number for match in matches if match and (number := int(match[1])) > before)[-last:]


def bad_nodes(store: Store, run_id: str) -> frozenset[str]:
    """The nodes that were blamed for the end of two of the last ENDINGS launches, that failed the health check within a
    day, or that alone were blamed for wrong arithmetic: which of several was wrong is not known, and what the one
    computes next is no better."""
    blamed: Counter[str] = Counter()
    for ending in read_endings(store, run_id).values():
        nodes = ending.get("blamed_nodes", ())
        code = ending.get("code")
        if code == ExitCode.UNHEALTHY_NODE and time.time() - (ending.get("ended") or math.inf) > UNHEALTHY_SECONDS:
            continue
        sure = code == ExitCode.UNHEALTHY_NODE or (code == ExitCode.WRONG_ARITHMETIC and len(nodes) == 1)
        blamed.update(dict.fromkeys(nodes, BLAMES_TO_EXCLUDE if sure else 1))
    return frozenset(node for node, times in blamed.items() if times >= BLAMES_TO_EXCLUDE)


def avoided_nodes(store: Store, run_id: str, cluster: Cluster) -> frozenset[str]:
    """The nodes that the next launch does without: bad ones and, as `cluster.stragglers` says, those of ranks that were
    slow within SLOW_SECONDS. Of these only the newest: so many that `nodes.min` of `nodes.max` are left; where the
    number is fixed, as many as there are spares, or one."""
    bad, nodes = bad_nodes(store, run_id), cluster.nodes
    if cluster.stragglers != "exclude":
        return bad
    since = time.time() - SLOW_SECONDS
    named = [
        event
        for event in reversed(read_events(store, run_id, since, [StragglerDetected]))
        if isinstance(event, StragglerDetected)
    ]
    slow = dict.fromkeys(event.host for event in named if event.host not in bad)
    room = max(0, nodes.max - nodes.min - len(bad)) if nodes.min < nodes.max else max(1, cluster.spares)
    return bad.union(islice(slow, room))


def leaving_nodes(store: Store, run_id: str, cluster: Cluster) -> frozenset[str]:
    """The nodes that a cloud has just taken back. They may still be listed, and the machine that comes instead may have
    the same name: the next launch would rather have others."""
    if cluster.spot is None:
        return frozenset()
    return frozenset(event.host for event in reclaims(_recent_events(store, run_id)))


def was_reclaimed(store: Store, run_id: str, launch: int) -> bool:
    """Whether a cloud had just said that it takes a node of that launch back. Raises what the store does."""
    return bool(reclaims(_recent_events(store, run_id), launch))


def _recent_events(store: Store, run_id: str) -> list[Event]:
    """Those of a time that a notice still explains: a long run has many before it."""
    return read_events(store, run_id, after=time.time() - RECENT)
