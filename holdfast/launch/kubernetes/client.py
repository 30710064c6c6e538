"""Client for the few Kubernetes API requests of the launcher, on plain dictionaries.

Throttling, server errors, dropped connections and expired tokens are retried with a bounded, jittered backoff. Errors
that remain have an exit code. The `kubernetes` package does configuration and TLS.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import urllib3
from kubernetes.client import ApiClient, ApiException, Configuration

from holdfast.launch.kubernetes.api_errors import (
    SERVER,
    Blocker,
    ConflictError,
    GoneError,
    TransientError,
    refused,
)
from holdfast.launch.kubernetes.configuration import load_configuration, own_namespace
from holdfast.runtime import deadlines
from holdfast.runtime.retry import pause, retried
from holdfast.spec.errors import AccessDeniedError, DataError, MissingError
from holdfast.spec.json_parsing import parse_json_object

log = logging.getLogger("holdfast.launch")

Object = dict[str, Any]
CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0  # longest silence of the server
ANSWER_SECONDS = 180.0  # for a whole response that is not a stream
PATIENCE_SECONDS = 600.0  # the longest upgrade of the control plane
WATCH_SECONDS = 120  # after that, the server ends a watch; a connection that died silently is noticed a little later
STARTING_SECONDS = 60.0  # after a lost connection: a starting server knows no roles yet and refuses everything
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0  # seconds between tries
LOG_SECONDS = 300.0  # a log that is silent for this long is requested again: its connection may have died
LONGEST_LINE = 65536  # bytes of a log line; the rest is cut off
_TYPES = {"PATCH": "application/apply-patch+yaml"}  # JSON is a subset of it; the only kind of patch used here


@dataclass(frozen=True)
class Resource:
    """A kind of object."""

    group: str  # empty for the core group
    version: str
    plural: str
    namespaced: bool = True

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """The path of the collection, or of one object."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"{root}/namespaces/{namespace}" if self.namespaced else root
        return f"{place}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes", namespaced=False)
SECRETS = Resource("", "v1", "secrets")
EVENTS = Resource("", "v1", "events")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
WORKFLOWS = Resource("argoproj.io", "v1alpha1", "workflows")


_MAY_PASS = (TransientError, urllib3.exceptions.HTTPError, ValueError)


def backoff(failures: int) -> float:
    """Seconds to wait before following continues, after this many consecutive failures."""
    return pause(failures + 1, FIRST_PAUSE, LONGEST_PAUSE)


class Api:
    """The API server, as this process accesses it in one namespace. Thread-safe."""

    def __init__(
        self,
        configure: Callable[[], Configuration],
        namespace: str,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`configure` reads the configuration; it is called again when the server no longer accepts the token. A
        request is retried for `patience` seconds."""
        self.namespace = namespace
        self._configure = configure
        self._patience = patience
        self._lock = threading.Lock()
        self._lost_at = -math.inf  # when a connection was last lost
        self._client = self._connect()

    @classmethod
    def of_this_process(
        cls, namespace: str | None = None, patience: float = PATIENCE_SECONDS, context: str = ""
    ) -> Api:
        """The server of this pod's cluster, else that of the kubeconfig; of its `context`, if one is named. `namespace`
        defaults to theirs. Raises NoClusterError if none exists."""
        return cls(partial(load_configuration, context), namespace or own_namespace(context), patience)

    def within(self, namespace: str, patience: float | None = None) -> Api:
        """The same server in another namespace, or with another patience in seconds."""
        if namespace == self.namespace and patience is None:
            return self
        return Api(self._configure, namespace, self._patience if patience is None else patience)

    @property
    def host(self) -> str:
        """The address of the server."""
        return str(self._client.configuration.host)

    def read(self, path: str, **query: str) -> Object | None:
        """The object at any path, or None if none exists."""
        try:
            return self._json("GET", path, query)
        except MissingError:
            return None

    def ask(self, path: str, body: Object) -> Object:
        """The server's response to an object that is a query, such as an access review."""
        return self._json("POST", path, body=body)

    def get(self, resource: Resource, name: str) -> Object | None:
        """The object of that name, or None if none exists."""
        try:
            return self._json("GET", resource.path(self.namespace, name))
        except MissingError:
            return None

    def list(self, resource: Resource, selector: str) -> tuple[list[Object], str]:
        """The objects whose labels match, and the version from which a watch continues."""
        reply = self._json("GET", resource.path(self.namespace), {"labelSelector": selector})
        return reply["items"], reply["metadata"]["resourceVersion"]

    def events(self, name: str) -> Iterator[Object]:
        """The events about objects of that name, of any kind: at most a hundred."""
        query = {"fieldSelector": f"involvedObject.name={name}", "limit": "100"}
        yield from self._json("GET", EVENTS.path(self.namespace), query)["items"]

    def create(self, resource: Resource, body: Object) -> Object:
        """Create an object. Raises ConflictError if the name is taken, possibly by an earlier try of this request."""
        return self._json("POST", resource.path(self.namespace), body=body)

    def apply(self, resource: Resource, body: Object, manager: str) -> Object:
        """Server-side apply: set the fields in `body`, create the object if it does not exist, and keep all other
        fields. `manager` owns these fields from now on, also those of other managers."""
        path = resource.path(self.namespace, body["metadata"]["name"])
        return self._json("PATCH", path, {"fieldManager": manager, "force": "true"}, body)

    def replace(self, resource: Resource, body: Object) -> Object:
        """Write an object that was read before. Raises ConflictError if it has changed since."""
        return self._json("PUT", resource.path(self.namespace, body["metadata"]["name"]), body=body)

    def delete(self, resource: Resource, name: str, uid: str | None = None, *, background: bool = False) -> None:
        """Delete an object after everything that it owns. With `background`, delete it first: a reused name must
        not wait for the garbage collector. Does nothing if the object, or the one with that uid, is gone."""
        policy = "Background" if background else "Foreground"
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", resource.path(self.namespace, name), body=body)
        except (MissingError, ConflictError):
            return

    def watch(self, resource: Resource, selector: str, version: str) -> Iterator[tuple[str, Object]]:
        """(type, object) of every change after `version`, until the server closes. Raises TransientError, GoneError."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        path = resource.path(self.namespace)
        with self._stream(path, query, WATCH_SECONDS + READ_SECONDS) as lines:
            for line in lines:
                event = _object_in(line, f"watching {resource}")
                if not isinstance(event.get("object"), dict):
                    raise TransientError(f"watching {resource}: an answer without an object", 500)
                if event.get("type") == "ERROR":
                    status = event["object"]
                    if status.get("code") == 410:
                        raise GoneError(str(status.get("message")))
                    raise TransientError(f"watching {resource}: {status.get('message')}", int(status.get("code", 500)))
                yield str(event.get("type")), event["object"]

    def log(
        self, pod: str, container: str, *, follow: bool, since: str | None = None, tail: int | None = None
    ) -> Lines:
        """Lines that a container printed, each preceded by its time. Raises TransientError and MissingError.

        since: only lines of this second and later (RFC 3339); tail: only this many of the last lines.
        """
        query = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
        if since is not None:
            query["sinceTime"] = since
        if tail is not None:
            query["tailLines"] = str(tail)
        read = LOG_SECONDS if follow else READ_SECONDS
        return self._stream(f"{PODS.path(self.namespace, pod)}/log", query, read)

    def _json(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Object | None = None
    ) -> Object:
        def ask(_: int) -> Object:
            with deadlines.within(ANSWER_SECONDS, urllib3.exceptions.TimeoutError):
                data = self._request(method, path, query or {}, body, READ_SECONDS).data
            return _object_in(data, f"{method} {path}")

        def note(attempt: int, error: BaseException) -> None:
            description = getattr(error, "by", SERVER).words
            log.log(logging.INFO if attempt == 4 else logging.DEBUG, "%s: %s", description, error)

        try:
            return retried(
                ask,
                lambda error: isinstance(error, _MAY_PASS),
                first=FIRST_PAUSE,
                longest=LONGEST_PAUSE,
                seconds=self._patience,
                at_least=lambda error: getattr(error, "retry_after", 0.0),
                note=note,
            )
        except _MAY_PASS as error:
            if getattr(error, "status", 0) == 401:
                raise AccessDeniedError(f"{error}; renew the credentials: kubectl auth whoami") from error
            by: Blocker = getattr(error, "by", SERVER)
            raise by.lasting(
                f"{method} {path} failed for {self._patience:.0f} s, because {by.words}, lastly with: {error}; "
                f"{by.remedy}"
            ) from error

    def _stream(self, path: str, query: Mapping[str, str], read: float) -> Lines:
        return Lines(self._request("GET", path, query, None, read))

    def _request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | None, read: float
    ) -> urllib3.BaseHTTPResponse:
        """One try. The response's body is not read yet. Raises TransientError and errors with an exit code."""
        client = self._client
        content_type = _TYPES.get(method, "application/json")
        try:
            response: urllib3.BaseHTTPResponse = client.call_api(
                path,
                method,
                query_params=list(query.items()),
                body=body,
                auth_settings=["BearerToken"],
                header_params={"Accept": "application/json, */*", "Content-Type": content_type},
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=(CONNECT_SECONDS, read),
            )
            return response
        except ApiException as error:
            if error.status == 401:
                self._reconnect(client)
            if error.status == 403 and time.monotonic() - self._lost_at < STARTING_SECONDS:
                raise TransientError(f"{method} {path}: refused by a server that has just begun", 403, 1.0) from error
            raise refused(error, f"{method} {path}") from None
        except urllib3.exceptions.HTTPError as error:
            self._lost_at = time.monotonic()
            raise TransientError(f"{method} {path}: {error}") from error

    def _connect(self) -> ApiClient:
        configuration = self._configure()
        configuration.retries = False  # retries are done here
        configuration.connection_pool_maxsize = 16
        client = ApiClient(configuration)
        deadlines.bound(client.rest_client.pool_manager)
        return client

    def _reconnect(self, former: ApiClient) -> None:
        """Read the token again: a service account's token file is renewed while the process runs."""
        with self._lock:
            if self._client is former:
                self._client = self._connect()


class Lines:
    """The lines of a response, as they arrive. Closing it from another thread ends the wait for the next one."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        try:
            for chunk in self._response.stream(LONGEST_LINE, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                if len(rest) > 64 * LONGEST_LINE:  # not a line of ours; objects of a watch are smaller, too
                    rest = rest[:LONGEST_LINE]
        except (urllib3.exceptions.HTTPError, OSError, AttributeError, ValueError) as error:  # the last two: closed
            if not self._closed:
                raise TransientError(f"the connection broke: {error}") from error
        if rest and not self._closed:
            yield rest

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        connection = getattr(self._response, "connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads from it, which close() does not

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._response.close()


def _object_in(data: bytes | str, what: str) -> Object:
    """The object in the API server's response. Raises TransientError if it is not an object: a proxy may have cut
    it."""
    try:
        return parse_json_object(data, what, "ask again")
    except DataError as error:
        raise TransientError(str(error), 500) from None
