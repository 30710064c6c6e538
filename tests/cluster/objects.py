"""The objects of a cluster in this process: versions, conflicts, preconditions and deletions, as an API server keeps
them. `tests.cluster.remote` has the same interface over a real API server."""

import copy
import json
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Edit = Callable[[Object], None]
Key = tuple[str, str, str]  # plural, namespace, name
NAMESPACE = "training"
CLUSTER_SCOPED = frozenset({"namespaces", "nodes"})


def now() -> str:
    """The current time in the format of objects."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StatusError(Exception):
    """A refusal, with the status and the message of the reply."""

    def __init__(self, code: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


class Table:
    """Known objects, and the version of the newest state. `changed` guards them and notifies. Without a namespace,
    methods use that of the training jobs; `all` reads every namespace."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self._objects: dict[Key, Object] = {}

    def all(self, plural: str, namespace: str | None = None) -> list[Object]:
        with self.changed:
            return [
                copy.deepcopy(body)
                for (kind, place, _), body in self._objects.items()
                if kind == plural and namespace in (None, place)
            ]

    def get(self, plural: str, name: str, namespace: str = NAMESPACE) -> Object | None:
        with self.changed:
            return copy.deepcopy(self._objects.get(key_of(plural, namespace, name)))

    def knows(self, reference: Object, namespace: str) -> bool:
        """Whether the owner that an object of `namespace` names exists in the same namespace."""
        with self.changed:
            return any(
                body["metadata"]["uid"] == reference["uid"] and place == namespace
                for (_, place, _), body in self._objects.items()
            )


class Objects(Table):
    """All objects, and every change by its version."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = 0  # no watch can start before it
        self.history: list[tuple[int, str, str, Object]] = []
        self.admit: Callable[[str, Object], None] = lambda plural, body: None  # raises StatusError

    def create(self, plural: str, body: Object) -> Object:
        body = copy.deepcopy(body)
        name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", NAMESPACE)
        with self.changed:
            if key_of(plural, namespace, name) in self._objects:
                raise StatusError(409, f'{plural} "{name}" already exists')
            body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
            if plural not in CLUSTER_SCOPED:
                body["metadata"]["namespace"] = namespace
            self.admit(plural, body)
            self._objects[key_of(plural, namespace, name)] = body
            self._log("ADDED", plural, body)
            return copy.deepcopy(body)

    def change(
        self, plural: str, name: str, edit: Edit, uid: str | None = None, namespace: str = NAMESPACE
    ) -> Object | None:
        """Apply `edit` to an object (with that uid). Returns None when it does not exist."""
        key = key_of(plural, namespace, name)
        with self.changed:
            body = self._objects.get(key)
            if body is None or (uid is not None and body["metadata"]["uid"] != uid):
                return None
            before = json.dumps(body, sort_keys=True)
            fresh = copy.deepcopy(body)
            edit(fresh)
            if json.dumps(fresh, sort_keys=True) != before:
                if fresh.get("spec") != body.get("spec"):
                    fresh["metadata"]["generation"] = body["metadata"].get("generation", 1) + 1
                self._objects[key] = fresh
                self._log("MODIFIED", plural, fresh)
            return copy.deepcopy(fresh)

    def replace(self, plural: str, body: Object) -> Object:
        metadata = body["metadata"]
        key = key_of(plural, metadata.get("namespace", NAMESPACE), metadata["name"])
        with self.changed:
            current = self._objects.get(key)
            if current is None:
                raise StatusError(404, f'{plural} "{metadata["name"]}" not found')
            if metadata.get("resourceVersion") not in (None, current["metadata"]["resourceVersion"]):
                raise StatusError(409, "the object has been modified")
            fresh = copy.deepcopy(body)
            fresh["metadata"] = {**current["metadata"], **metadata}
            self._objects[key] = fresh
            self._log("MODIFIED", plural, fresh)
            return copy.deepcopy(fresh)

    def delete(
        self, plural: str, name: str, uid: str | None = None, foreground: bool = False, namespace: str = NAMESPACE
    ) -> None:
        """Request an object's deletion. Pods, and jobs deleted in the foreground, go once their dependents are gone."""
        key = key_of(plural, namespace, name)
        with self.changed:
            body = self._objects.get(key)
            if body is None:
                raise StatusError(404, f'{plural} "{name}" not found')
            if uid is not None and body["metadata"]["uid"] != uid:
                raise StatusError(409, "the UID in the precondition does not match")
            if plural == "pods" or foreground:
                if "deletionTimestamp" not in body["metadata"]:
                    body = copy.deepcopy(body)
                    body["metadata"]["deletionTimestamp"] = now()
                    if foreground:
                        body["metadata"]["finalizers"] = ["foregroundDeletion"]
                    self._objects[key] = body
                    self._log("MODIFIED", plural, body)
            else:
                self.remove(plural, name, namespace)

    def remove(self, plural: str, name: str, namespace: str = NAMESPACE) -> None:
        """Remove an object immediately."""
        with self.changed:
            body = self._objects.pop(key_of(plural, namespace, name), None)
            if body is not None:
                self._log("DELETED", plural, copy.deepcopy(body))

    def forget(self) -> None:
        """Compact: no earlier version is known any more."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version
            self.changed.notify_all()

    def _log(self, kind: str, plural: str, body: Object) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, plural, copy.deepcopy(body)))
        self.changed.notify_all()


def key_of(plural: str, namespace: str, name: str) -> Key:
    return plural, "" if plural in CLUSTER_SCOPED else namespace, name


def matches(body: Object, selector: str) -> bool:
    """Whether an object's labels have all of the `key=value` in a selector."""
    labels = body["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in (part.split("=") for part in selector.split(",") if part))


def selected(body: Object, selector: str) -> bool:
    """Whether an object's fields have all of the `path=value` in a field selector."""
    for part in filter(None, selector.split(",")):
        path, _, value = part.partition("=")
        current: Any = body
        for step in path.split("."):
            current = (current or {}).get(step)
        if str(current or "") != value.removeprefix("="):
            return False
    return True
