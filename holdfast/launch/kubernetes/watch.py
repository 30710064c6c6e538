"""What a follower sees of the API server: `Mirror`, a copy of objects, and `PodEvents`, the newest warning.

A thread keeps a mirror current: it lists and watches. No change is missed for long. A watch that ends continues from
its version, and a forgotten version causes a new list. The thread waits for an unavailable API server without a busy
loop. Deleted objects are kept as they were last seen.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Self

from holdfast.launch.kubernetes.api_errors import GoneError, TransientError
from holdfast.launch.kubernetes.classify import explains_missing_pods
from holdfast.launch.kubernetes.client import Api, Object, Resource, backoff
from holdfast.spec.errors import AccessDeniedError, ClusterUnreachableError, HoldfastError

log = logging.getLogger("holdfast.launch")

ASK_SECONDS = 3.0  # between two queries of events
LONGEST_WORDS = 400


class Mirror:
    """The objects of one kind whose labels match `selector`. `changed` is notified of every change."""

    def __init__(self, api: Api, resource: Resource, selector: str, changed: threading.Condition) -> None:
        self.objects: dict[str, Object] = {}  # by uid
        self.gone: dict[str, Object] = {}  # by uid, as last seen; hold `changed` to read any of these
        self.synced = False
        self.failure: HoldfastError | None = None  # why the watch cannot continue
        self._api, self._resource, self._selector, self._changed = api, resource, selector, changed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"watch {resource.plural}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()  # the thread is a daemon: it may block in a read until its next event

    def _follow(self) -> None:
        version, failures = None, 0
        while not self._closing.is_set():
            start = time.monotonic()
            try:
                if version is None:
                    version = self._list()
                for kind, obj in self._api.watch(self._resource, self._selector, version):
                    version = obj["metadata"]["resourceVersion"]
                    failures = 0
                    if self._closing.is_set():
                        return
                    if kind != "BOOKMARK":
                        self._note(obj, deleted=kind == "DELETED")
                failures = 0 if time.monotonic() - start > 1 else failures + 1  # repeatedly closed immediately?
            except GoneError:
                version, failures = None, failures + 1
            except (TransientError, ClusterUnreachableError) as error:
                failures += 1
                log.log(logging.INFO if failures == 5 else logging.DEBUG, "watching continues when it can: %s", error)
            except HoldfastError as error:
                with self._changed:
                    self.failure = error
                    self._changed.notify_all()
                return
            if failures:
                self._closing.wait(backoff(failures))

    def _list(self) -> str:
        items, version = self._api.list(self._resource, self._selector)
        with self._changed:
            now = {item["metadata"]["uid"]: item for item in items}
            self.gone |= {uid: item for uid, item in self.objects.items() if uid not in now}
            self.objects = now
            self.synced = True
            self._changed.notify_all()
        return version

    def _note(self, found: Object, *, deleted: bool) -> None:
        uid = found["metadata"]["uid"]
        with self._changed:
            if deleted:
                self.objects.pop(uid, None)
                self.gone[uid] = found
            else:
                self.objects[uid] = found
            self._changed.notify_all()


class PodEvents:
    """The newest warning about some objects, queried at intervals. While the server is unavailable, it adds nothing."""

    def __init__(self, api: Api) -> None:
        self._api = api.within(api.namespace, patience=ASK_SECONDS)
        self._polled_at: float | None = None
        self._allowed = True
        self.words = ""

    def ask(self, names: Sequence[str]) -> None:
        """Query the events of the objects `names`, unless that was just done."""
        now = time.monotonic()
        if not self._allowed or (self._polled_at is not None and now - self._polled_at < ASK_SECONDS):
            return
        self._polled_at = now
        warnings: list[Object] = []
        try:
            for name in names:
                warnings += [event for event in self._api.events(name) if explains_missing_pods(event)]
        except AccessDeniedError as error:
            log.warning("why pods do not come is unknown: %s", error)
            self._allowed = False
        except HoldfastError as error:
            log.debug("events cannot be read: %s", error)
        if warnings:
            newest = max(warnings, key=_when)
            self.words = " ".join(f"{newest.get('reason', '')}: {newest.get('message', '')}".split())[:LONGEST_WORDS]


def _when(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp", ""))
