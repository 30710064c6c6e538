"""A machine that its cloud takes back: the notice becomes a save and a leave, as if this node had been told to go.

A thread of the process that supervises the ranks asks the cloud's metadata service. A notice is the SIGTERM that a
drained node gets: the ranks of all nodes agree on a step, save it and leave. It is told as an event, by which the
launcher knows that the restart costs nothing and which node to do without.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Self

from holdfast.launch.node.events import NodeEvents
from holdfast.launch.node.spot_metadata import CLOUDS, SERVICE, Cloud, Notice
from holdfast.runtime.node import node_name
from holdfast.telemetry.events import Event, NodeReclaimed, WarningIssued

CLOUD = "HOLDFAST_SPOT"  # the cloud that is asked, in the environment of each node's torchrun
SERVICE_URL = "HOLDFAST_METADATA_URL"  # where, if not where all clouds have it
RECENT = 600.0  # seconds after a notice: what ends then ends because of it, and its node is gone or another one
AFTER_FAILURE = 10.0  # seconds until a service that did not answer is asked again
TELL_SECONDS = 10.0  # for the event, once the ranks have left

log = logging.getLogger("holdfast.launch")


class SpotNoticeWatch:
    """`with SpotNoticeWatch(events)`: asks the cloud that the environment names, if it names one, meanwhile."""

    def __init__(self, events: NodeEvents) -> None:
        """`events`: are told of what the cloud says."""
        self._events = events
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.words = ""  # the notice, once there is one

    def __enter__(self) -> Self:
        if name := os.environ.get(CLOUD):
            cloud = CLOUDS[name](os.environ.get(SERVICE_URL) or SERVICE)
            self._thread = threading.Thread(target=self._watch, args=(cloud,), name="reclaims", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks have ended: a notice says nothing new any more, and one that came is told.
        self._closing.set()
        if self._thread is not None and self.words:
            self._thread.join(TELL_SECONDS)

    def _watch(self, cloud: Cloud) -> None:
        deaf, warned = False, False
        while not self._closing.is_set():
            try:
                notice, deaf = cloud.ask(), False
            except (OSError, ValueError, KeyError, TypeError) as error:
                if not deaf:
                    log.warning(
                        "the cloud does not say whether it reclaims this node (cluster.spot; asked again): %s: %s",
                        type(error).__name__, str(error)[:200],
                    )  # fmt: skip
                deaf, notice = True, None
            if notice is not None and notice.certain and not self._closing.is_set():
                self._leave(notice)
                return
            if notice is not None and not warned:
                warned = True
                self._events.tell(
                    WarningIssued(message=f"node {node_name()}: {notice.words}, and has not said that it will")
                )
            self._closing.wait(AFTER_FAILURE if deaf else cloud.pause)

    def _leave(self, notice: Notice) -> None:
        event = NodeReclaimed(host=node_name(), seconds=notice.seconds, reason=notice.words)
        self.words = event.text
        log.warning("%s: the ranks save and leave", event.text)
        os.kill(os.getpid(), signal.SIGTERM)
        self._events.tell(event)  # afterwards: a store that is away keeps nobody


def reclaims(events: Iterable[Event], launch: int | None = None) -> list[NodeReclaimed]:
    """The notices among `events` that still explain something: recent ones, of `launch` if one is given."""
    since = time.time() - RECENT
    return [
        event
        for event in events
        if isinstance(event, NodeReclaimed) and event.time >= since and launch in (None, event.launch)
    ]
