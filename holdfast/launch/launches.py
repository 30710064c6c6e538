"""Launches: each start of a run's gang by a launcher, with the ranks' assignment and how the launch ended.

A launch is not an attempt. A gang may form again within a launch: by torchrun's membership restart, a requeue, or an
operator. It then starts the same command again and claims a new attempt.
"""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pydantic import BaseModel, FiniteFloat

from holdfast.launch.exits import LaunchExit
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

UNHEALTHY_SECONDS = 86_400.0  # how long a failed health check excludes a node: it may have been repaired
SLOW_SECONDS = 7 * 86_400.0  # how long a slow rank excludes its node from the run
RECENT_LAUNCHES = 100  # launches whose endings the next launch considers
BLAMES_TO_EXCLUDE = 2  # launches that a node may fail before the next ones avoid it


class LaunchRecord(BaseModel, frozen=True):
    """A launch, as it was claimed."""

    host: str = ""  # of the launcher
    pid: int = 0
    claimed: FiniteFloat = 0.0  # unix seconds by the launcher's clock
    assignment: dict[str, Any]  # what the ranks compute; the trainer checks it
    replan: bool = False  # whether they may compute it under another plan than earlier attempts


def claim_launch(store: Store, run_id: str, assignment: Mapping[str, Any], *, replan: bool = False) -> int:
    """Take the number of the next launch, which fences off gangs of older launches. The ranks read `assignment`. With
    `replan`, they may compute it under a different plan than earlier attempts."""
    return take_next(store, layout.launches(run_id), {"assignment": assignment, "replan": replan})


def newest_launch(store: Store, run_id: str) -> int:
    """The number of the newest launch; 0 if the run was never launched."""
    return newest(store, layout.launches(run_id))


def read_launch(store: Store, run_id: str, number: int) -> LaunchRecord:
    """The record of a launch. Raises MissingError, and BadReaderError if it is incomplete."""
    record = read_record(store, layout.launches(run_id), number, LaunchRecord)
    return LaunchRecord.model_validate(record)


def record_exit(store: Store, run_id: str, number: int, ended: LaunchExit) -> None:
    """Record how a launch ended. The next launch reads it."""
    store.put(layout.ending(run_id, number), ended.model_dump_json().encode())


def read_exit(store: Store, run_id: str, number: int) -> LaunchExit | None:
    """The record of how a launch ended. None if it has not ended, its launcher died, or the record is damaged: the next
    launch then starts without it."""
    key = layout.ending(run_id, number)
    try:
        return read_json(store, key, LaunchExit, "it is left out")
    except MissingError:
        return None
    except DataError as error:
        log.warning("%s", error)
        return None


def read_exits(store: Store, run_id: str, last: int = RECENT_LAUNCHES) -> dict[int, LaunchExit]:
    """The records of how the newest launches ended, by number. Only the `last` launches are listed and read, so a
    launch does not slow down after ten thousand launches of its run."""
    numbers = _ended(store, run_id, last)
    endings = in_parallel(lambda number: read_exit(store, run_id, number), numbers)
    return {number: ending for number, ending in zip(numbers, endings, strict=True) if ending is not None}


def nodes_of_the_last_end(store: Store, run_id: str) -> tuple[str, ...]:
    """The nodes that the launch which ended last blames."""
    newest_first = reversed(_ended(store, run_id, RECENT_LAUNCHES))
    endings = (ending for number in newest_first if (ending := read_exit(store, run_id, number)) is not None)
    return next((ending.blamed_nodes for ending in endings), ())


def _ended(store: Store, run_id: str, last: int) -> list[int]:
    """The numbers of those of the `last` launches that have ended, in ascending order."""
    folder = layout.launches(run_id)
    before = max(0, newest(store, folder) - last)
    infos = store.list(folder, record_key(folder, before) if before else "")
    matches = (re.search(r"/(\d{6,})\.ending\.json$", info.key) for info in infos)
    return sorted(number for match in matches if match and (number := int(match[1])) > before)[-last:]


def bad_nodes(store: Store, run_id: str) -> frozenset[str]:
    """The nodes that the next launch must not use.

    - nodes that two of the last RECENT_LAUNCHES launches blamed
    - nodes that failed the health check within a day
    - a node that was the only one blamed for wrong arithmetic: its next results are no better

    Of several nodes that were blamed for wrong arithmetic, the wrong one is unknown.
    """
    blamed: Counter[str] = Counter()
    for ending in read_exits(store, run_id).values():
        nodes, code = ending.blamed_nodes, ending.code
        if code == ExitCode.UNHEALTHY_NODE and time.time() - (ending.ended or math.inf) > UNHEALTHY_SECONDS:
            continue
        sure = code == ExitCode.UNHEALTHY_NODE or (code == ExitCode.WRONG_ARITHMETIC and len(nodes) == 1)
        blamed.update(dict.fromkeys(nodes, BLAMES_TO_EXCLUDE if sure else 1))
    return frozenset(node for node, times in blamed.items() if times >= BLAMES_TO_EXCLUDE)


def avoided_nodes(store: Store, run_id: str, cluster: Cluster) -> frozenset[str]:
    """The nodes that the next launch avoids: bad nodes and, with `cluster.stragglers: exclude`, nodes of slow ranks.

    A rank counts as slow for SLOW_SECONDS. Only the newest slow nodes are avoided, so that `nodes.min` of `nodes.max`
    remain. With a fixed number of nodes, as many are avoided as there are spares, or one.
    """
    bad, nodes = bad_nodes(store, run_id), cluster.nodes
    if cluster.stragglers != "exclude":
        return bad
    since = time.time() - SLOW_SECONDS
    slow_events = [
        event
        for event in reversed(read_events(store, run_id, since, [StragglerDetected]))
        if isinstance(event, StragglerDetected)
    ]
    slow = dict.fromkeys(event.host for event in slow_events if event.host not in bad)
    room = max(0, nodes.max - nodes.min - len(bad)) if nodes.min < nodes.max else max(1, cluster.spares)
    return bad.union(islice(slow, room))


def leaving_nodes(store: Store, run_id: str, cluster: Cluster) -> frozenset[str]:
    """The nodes that a cloud has just reclaimed. They may still be listed, and the replacement machine may have the
    same name, so the next launch prefers other nodes."""
    if cluster.spot is None:
        return frozenset()
    return frozenset(event.host for event in reclaims(_recent_events(store, run_id)))


def was_reclaimed(store: Store, run_id: str, launch: int) -> bool:
    """Whether a cloud recently announced that it reclaims a node of that launch. Raises the errors of the store."""
    return bool(reclaims(_recent_events(store, run_id), launch))


def _recent_events(store: Store, run_id: str) -> list[Event]:
    """The events that are recent enough for a reclaim notice to matter: a long run has many older ones."""
    return read_events(store, run_id, after=time.time() - RECENT)
