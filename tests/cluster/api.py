"""The part of the Kubernetes API that the launcher meets, over real HTTP: versions, watches with bookmarks and 410,
conflicts, preconditions, foreground deletion and owner references, logs that are followed, tokens, RBAC, and faults."""

from __future__ import annotations

import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
NAMESPACE = "training"
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>log))?$"
)
PLURALS = {
    "pods": "", "leases": "coordination.k8s.io", "workflows": "argoproj.io", "workflowtemplates": "argoproj.io",
    "pytorchjobs": "kubeflow.org",
    "trainjobs": "trainer.kubeflow.org", "trainingruntimes": "trainer.kubeflow.org", "jobs": "batch.volcano.sh",
}  # fmt: skip
_JOB = {"create", "get", "list", "watch", "delete"}
ALLOWED: dict[str, set[str]] = {  # what the launcher's Role grants
    "pods": {"get", "list", "watch"},
    "pods/log": {"get"},
    "leases": {"create", "get", "update", "delete"},
    "workflows": {"get"},
    "pytorchjobs": _JOB,
    "trainjobs": _JOB,
    "trainingruntimes": {"create", "get", "list", "delete"},
    "jobs": _JOB,
}


def now() -> str:
    """The time, as objects carry it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StatusError(Exception):
    """A refusal, with the status and the message of the reply."""

    def __init__(self, code: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


class Objects:
    """All objects by (plural, name), and every change by its version. `changed` guards and tells."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self.forgotten = 0  # a watch cannot start from before it
        self.history: list[tuple[int, str, str, Object]] = []
        self._objects: dict[tuple[str, str], Object] = {}

    def all(self, plural: str) -> list[Object]:
        with self.changed:
            return [copy.deepcopy(found) for (kind, _), found in self._objects.items() if kind == plural]

    def get(self, plural: str, name: str) -> Object | None:
        with self.changed:
            return copy.deepcopy(self._objects.get((plural, name)))

    def create(self, plural: str, body: Object) -> Object:
        body = copy.deepcopy(body)
        name = body["metadata"]["name"]
        with self.changed:
            if (plural, name) in self._objects:
                raise StatusError(409, f'{plural} "{name}" already exists')
            body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "namespace": NAMESPACE}
            self._objects[plural, name] = body
            self._log("ADDED", plural, body)
            return copy.deepcopy(body)

    def change(self, plural: str, name: str, edit: Callable[[Object], None], uid: str | None = None) -> Object | None:
        """Apply `edit` to an object (of that uid); None when it is not there."""
        with self.changed:
            found = self._objects.get((plural, name))
            if found is None or (uid is not None and found["metadata"]["uid"] != uid):
                return None
            before = json.dumps(found, sort_keys=True)
            fresh = copy.deepcopy(found)
            edit(fresh)
            if json.dumps(fresh, sort_keys=True) != before:
                self._objects[plural, name] = fresh
                self._log("MODIFIED", plural, fresh)
            return copy.deepcopy(fresh)

    def replace(self, plural: str, body: Object) -> Object:
        metadata = body["metadata"]
        with self.changed:
            found = self._objects.get((plural, metadata["name"]))
            if found is None:
                raise StatusError(404, f'{plural} "{metadata["name"]}" not found')
            if metadata.get("resourceVersion") not in (None, found["metadata"]["resourceVersion"]):
                raise StatusError(409, "the object has been modified")
            fresh = copy.deepcopy(body)
            fresh["metadata"] = {**found["metadata"], **metadata}
            self._objects[plural, metadata["name"]] = fresh
            self._log("MODIFIED", plural, fresh)
            return copy.deepcopy(fresh)

    def delete(self, plural: str, name: str, uid: str | None = None, foreground: bool = False) -> None:
        """Ask an object to go: pods and jobs with pods go when what they have is gone."""
        with self.changed:
            found = self._objects.get((plural, name))
            if found is None:
                raise StatusError(404, f'{plural} "{name}" not found')
            if uid is not None and found["metadata"]["uid"] != uid:
                raise StatusError(409, "the UID in the precondition does not match")
            if plural == "pods" or foreground:
                if "deletionTimestamp" not in found["metadata"]:
                    found = copy.deepcopy(found)
                    found["metadata"]["deletionTimestamp"] = now()
                    self._objects[plural, name] = found
                    self._log("MODIFIED", plural, found)
            else:
                self.remove(plural, name)

    def remove(self, plural: str, name: str) -> None:
        """Take an object out of the world."""
        with self.changed:
            found = self._objects.pop((plural, name), None)
            if found is not None:
                self._log("DELETED", plural, copy.deepcopy(found))

    def forget(self) -> None:
        """Compact: no version that was given out is known any more."""
        with self.changed:
            self.version += 1
            self.forgotten = self.version
            self.changed.notify_all()

    def _log(self, kind: str, plural: str, body: Object) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, plural, copy.deepcopy(body)))
        self.changed.notify_all()


def matches(body: Object, selector: str) -> bool:
    """Whether an object's labels have all of the `key=value` in a selector."""
    labels = body["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in (part.split("=") for part in selector.split(",") if part))


class ApiServer:
    """`with ApiServer() as api`: a running API server with no objects, at `api.url`."""

    def __init__(self) -> None:
        self.objects = Objects()
        self.logs: Callable[[str], Any] = lambda name: None
        self.allowed = ALLOWED
        self.tokens: set[str] = {"token-1"}
        self.requests: list[tuple[str, str]] = []  # (verb, plural), as RBAC sees them
        self.faults: list[Callable[[str, str], StatusError | None]] = []  # asked for (verb, plural)
        self.generation = 0  # raised to drop every open stream
        self.away = False  # connections are closed without a word
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_any(self) -> None:
                server._handle(self)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True, name="api").start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop_connections()
        self._server.shutdown()
        self._server.server_close()

    def drop_connections(self) -> None:
        """Break every watch and log that is open."""
        with self.objects.changed:
            self.generation += 1
            self.objects.changed.notify_all()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The server is away while in the context."""
        self.away = True
        self.drop_connections()
        try:
            yield
        finally:
            self.away = False

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length) or b"{}") if length else {}
        if self.away:
            request.close_connection = True
            return
        try:
            self._answer(request, body)
        except StatusError as error:
            self._reply(request, error.code, {"kind": "Status", "message": str(error), "code": error.code}, error)
        except (BrokenPipeError, ConnectionResetError):
            request.close_connection = True

    def _answer(self, request: BaseHTTPRequestHandler, body: Object) -> None:
        address = urlsplit(request.path)
        query = {key: values[-1] for key, values in parse_qs(address.query).items()}
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise StatusError(401, "Unauthorized")
        match = _PATH.match(address.path)
        if match is None or PLURALS.get(match["plural"]) != (match["group"] or ""):
            raise StatusError(404, "the server could not find the requested resource")
        plural, name = match["plural"], match["name"] or ""
        resource = f"{plural}/log" if match["sub"] else plural
        verb = {"POST": "create", "PUT": "update", "DELETE": "delete", "GET": "get" if name else "list"}[
            request.command
        ]
        verb = "watch" if query.get("watch") == "true" else verb
        self.requests.append((verb, resource))
        if match["namespace"] != NAMESPACE or verb not in self.allowed.get(resource, ()):
            raise StatusError(403, f'{resource} is forbidden: User "launcher" cannot {verb} resource "{resource}"')
        for fault in list(self.faults):
            if (error := fault(verb, resource)) is not None:
                raise error
        if verb == "watch":
            self._watch(request, plural, query)
        elif resource == "pods/log":
            self._log(request, name, query)
        else:
            self._reply(request, 200, self._do(verb, plural, name, body, query.get("labelSelector", "")))

    def _do(self, verb: str, plural: str, name: str, body: Object, selector: str) -> Object:
        if verb == "create":
            return self.objects.create(plural, body)
        if verb == "update":
            return self.objects.replace(plural, body)
        if verb == "delete":
            foreground = body.get("propagationPolicy") == "Foreground" and plural != "leases"
            uid = (body.get("preconditions") or {}).get("uid")
            self.objects.delete(plural, name, uid, foreground)
            return {"kind": "Status", "status": "Success"}
        if verb == "list":
            with self.objects.changed:
                items = [found for found in self.objects.all(plural) if matches(found, selector)]
                return {"items": items, "metadata": {"resourceVersion": str(self.objects.version)}}
        found = self.objects.get(plural, name)
        if found is None:
            raise StatusError(404, f'{plural} "{name}" not found')
        return found

    def _reply(
        self, request: BaseHTTPRequestHandler, code: int, body: Object, error: StatusError | None = None
    ) -> None:
        data = json.dumps(body).encode()
        request.send_response(code)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        if error is not None and error.retry_after is not None:
            request.send_header("Retry-After", str(error.retry_after))
        request.end_headers()
        request.wfile.write(data)

    @staticmethod
    def _chunked(request: BaseHTTPRequestHandler) -> Callable[[bytes], None]:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()

        def send(data: bytes) -> None:
            request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            request.wfile.flush()

        return send

    def _watch(self, request: BaseHTTPRequestHandler, plural: str, query: dict[str, str]) -> None:
        objects, generation = self.objects, self.generation
        seen, selector = int(query["resourceVersion"]), query.get("labelSelector", "")
        end = time.monotonic() + int(query.get("timeoutSeconds", "60"))
        if seen < objects.forgotten:
            raise StatusError(410, "too old resource version")
        send = self._chunked(request)
        while True:
            with objects.changed:
                objects.changed.wait_for(
                    lambda: objects.version != seen or self.generation != generation,  # noqa: B023
                    max(0.0, min(1.0, end - time.monotonic())),
                )
                news = [entry for entry in objects.history[-500:] if entry[0] > seen and entry[2] == plural]
                expired, version = objects.forgotten > seen, objects.version
            if self.generation != generation:
                request.close_connection = True
                return  # in the middle of the stream
            if expired:
                status = {"kind": "Status", "code": 410, "message": "too old resource version"}
                send(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                break
            for _, kind, _, body in news:
                if matches(body, selector):
                    send(json.dumps({"type": kind, "object": body}).encode() + b"\n")
            seen = version
            send(
                json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(seen)}}}).encode()
                + b"\n"
            )
            if time.monotonic() >= end:
                break
        request.wfile.write(b"0\r\n\r\n")

    def _log(self, request: BaseHTTPRequestHandler, name: str, query: dict[str, str]) -> None:
        printed = self.logs(name)
        if printed is None:
            raise StatusError(404, f'pods "{name}" not found')
        generation, follow = self.generation, query.get("follow") == "true"
        since, sent = query.get("sinceTime", ""), 0
        lines, ended = printed.snapshot()
        if "tailLines" in query:
            sent = max(0, len(lines) - int(query["tailLines"]))
        send = self._chunked(request)
        with suppress(BrokenPipeError, ConnectionResetError):
            while True:
                lines, ended = printed.snapshot()
                fresh = [line for line in lines[sent:] if line[: len(since) - 1] >= since[:-1]]
                if fresh:
                    send("".join(f"{line}\n" for line in fresh).encode())
                sent = len(lines)
                if self.generation != generation:
                    request.close_connection = True
                    return
                if ended or not follow:
                    break
                printed.wait(sent, 0.2)
            request.wfile.write(b"0\r\n\r\n")
