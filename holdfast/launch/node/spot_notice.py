"""Reclaim notices: a machine that its cloud reclaims saves and leaves, as if this node had to stop.

A thread of the process that supervises the ranks polls the cloud's metadata service. On a notice, it sends the SIGTERM
that a drained node gets: the ranks of all nodes agree on a step, save it and leave. An event informs the launcher that
the restart costs nothing, and which node to avoid.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Self

from holdfast.launch.node.output import NodeEvents
from holdfast.launch.node.spot_metadata import CLOUDS, SERVICE, Cloud, Notice
from holdfast.runtime.node import node_name
from holdfast.telemetry.events import Event, NodeReclaimed, WarningIssued

CLOUD = "HOLDFAST_SPOT"  # the cloud to query, in the environment of each node's torchrun
SERVICE_URL = "HOLDFAST_METADATA_URL"  # its address, if not the usual one of all clouds
RECENT = 600.0  # seconds after a notice: an ending then is its effect, and its node is gone or replaced
AFTER_FAILURE = 10.0  # seconds until a service that did not respond is queried again
TELL_SECONDS = 10.0  # for the event, once the ranks have left

log = logging.getLogger("holdfast.launch")


class SpotNoticeWatch:
    """`with SpotNoticeWatch(events)`: polls the cloud that the environment names, if any, within the block."""

    def __init__(self, events: NodeEvents) -> None:
        """`events` receives the notices."""
        self._events = events
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.words = ""  # the notice, once it came

    def __enter__(self) -> Self:
        if name := os.environ.get(CLOUD):
            cloud = CLOUDS[name](os.environ.get(SERVICE_URL) or SERVICE)
            self._thread = threading.Thread(target=self._watch, args=(cloud,), name="reclaims", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks have ended: a later notice says nothing new. An earlier one is still emitted.
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
                        "the cloud does not say whether it reclaims this node (cluster.spot; queried again): %s: %s",
                        type(error).__name__,
                        str(error)[:200],
                    )
                deaf, notice = True, None
            if notice is not None and notice.certain and not self._closing.is_set():
                self._leave(notice)
                return
            if notice is not None and not warned:
                warned = True
                self._events.tell(
                    WarningIssued(message=f"node {node_name()}: {notice.words}, and has not confirmed it")
                )
            self._closing.wait(AFTER_FAILURE if deaf else cloud.pause)

    def _leave(self, notice: Notice) -> None:
        event = NodeReclaimed(host=node_name(), seconds=notice.seconds, reason=notice.words)
        self.words = event.text
        log.warning("%s: the ranks save and leave", event.text)
        os.kill(os.getpid(), signal.SIGTERM)
        self._events.tell(event)  # afterwards: an unavailable store delays nothing


def reclaims(events: Iterable[Event], launch: int | None = None) -> list[NodeReclaimed]:
    """The notices among `events` that are recent enough to explain an ending; only those of `launch`, if given."""
    since = time.time() - RECENT
    return [
        event
        for event in events
        if isinstance(event, NodeReclaimed) and event.time >= since and launch in (None, event.launch)
    ]
