"""The part of the Kubernetes API that the launcher uses, over real HTTP.

It implements versions, watches with bookmarks and 410, conflicts, preconditions, foreground deletion and owner
references. It also implements followed logs, tokens, RBAC, and faults.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.cluster.logs import chunked, stream
from tests.cluster.objects import NAMESPACE, Object, Objects, StatusError, matches, selected
from tests.http_server import QuietHandler

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>log))?$"
)
_NODE = re.compile(r"/api/v1/nodes/(?P<name>[^/]+)$")
PLURALS = {
    "pods": "", "events": "", "secrets": "", "leases": "coordination.k8s.io",
    "workflows": "argoproj.io", "workflowtemplates": "argoproj.io",
    "pytorchjobs": "kubeflow.org",
    "trainjobs": "trainer.kubeflow.org", "trainingruntimes": "trainer.kubeflow.org", "jobs": "batch.volcano.sh",
}  # fmt: skip
_JOB = {"create", "get", "list", "watch", "delete"}
ALLOWED: dict[str, set[str]] = {  # what the launcher's Role grants
    "pods": {"get", "list", "watch"},
    "pods/log": {"get"},
    "events": {"list"},
    "secrets": {"create"},
    "leases": {"create", "get", "update", "delete"},
    "workflows": {"get"},
    "pytorchjobs": _JOB,
    "trainjobs": _JOB,
    "trainingruntimes": {"create", "get", "list", "delete"},
    "jobs": _JOB,
}


class ApiServer:
    """`with ApiServer() as api`: a running API server with no objects, at `api.url`."""

    def __init__(self) -> None:
        self.objects = Objects()
        self.logs: Callable[[str], Any] = lambda name: None
        self.allowed = ALLOWED
        self.elsewhere: dict[str, dict[str, set[str]]] = {}  # by namespace: what the launcher may do there
        self.tokens: set[str] = {"token-1"}
        self.requests: list[tuple[str, str]] = []  # (verb, plural), as RBAC sees them
        self.faults: list[Callable[[str, str], StatusError | None]] = []  # called with (verb, plural)
        self.generation = 0  # raised to drop every open stream
        self.away = False  # connections are closed without an answer
        self.may_patch_nodes = False
        server = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                server._handle(self)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any  # noqa: N815

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

    def add_node(self, name: str) -> None:
        """A node of the cluster."""
        self.objects.create("nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})

    def users(self) -> Object:
        """How a kubeconfig names the server and its user."""
        return {"cluster": {"server": self.url}, "user": {}}

    def drop_connections(self) -> None:
        """Break every open watch and log stream."""
        with self.objects.changed:
            self.generation += 1
            self.objects.changed.notify_all()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Context in which the server is away."""
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
        if request.command == "PATCH" and (node := _NODE.match(address.path)):
            self._patch_node(request, node["name"], body, query)
            return
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
        namespace = match["namespace"]
        allowed = self.allowed if namespace == NAMESPACE else self.elsewhere.get(namespace, {})
        if verb not in allowed.get(resource, ()):
            raise StatusError(
                403,
                f'{resource} is forbidden: User "launcher" cannot {verb} resource "{resource}" in API group '
                f'"{match["group"] or ""}" in the namespace "{namespace}"',
            )
        for fault in list(self.faults):
            if (error := fault(verb, resource)) is not None:
                raise error
        if verb == "watch":
            self._watch(request, plural, namespace, query)
        elif resource == "pods/log":
            self._log(request, name, query)
        else:
            self._reply(request, 200, self._do(verb, plural, namespace, name, body, query))

    def _patch_node(self, request: BaseHTTPRequestHandler, name: str, body: Object, query: dict[str, str]) -> None:
        """Server-side apply of labels and annotations of a node. No other change of a node is supported."""
        if not self.may_patch_nodes:
            raise StatusError(403, 'nodes is forbidden: User "launcher" cannot patch resource "nodes" in API group ""')
        if not query.get("fieldManager") or request.headers["Content-Type"] != "application/apply-patch+yaml":
            raise StatusError(400, "PatchOptions is invalid: fieldManager is required for apply patch")
        if body.keys() != {"apiVersion", "kind", "metadata"}:
            raise StatusError(403, "the launcher changes nothing of a node but its metadata")

        def edit(node: Object) -> None:
            for kind in ("labels", "annotations"):
                node["metadata"].setdefault(kind, {}).update(body["metadata"][kind])

        changed = self.objects.change("nodes", name, edit)
        if changed is None:
            raise StatusError(404, f'nodes "{name}" not found')
        self._reply(request, 200, changed)

    def _do(self, verb: str, plural: str, namespace: str, name: str, body: Object, query: dict[str, str]) -> Object:
        if verb in ("create", "update") and body["metadata"].setdefault("namespace", namespace) != namespace:
            raise StatusError(400, "the namespace of the object does not match the namespace of the request")
        if verb == "create":
            return self.objects.create(plural, body)
        if verb == "update":
            return self.objects.replace(plural, body)
        if verb == "delete":
            foreground = body.get("propagationPolicy") == "Foreground"
            uid = (body.get("preconditions") or {}).get("uid")
            self.objects.delete(plural, name, uid, foreground, namespace)
            return {"kind": "Status", "status": "Success"}
        if verb == "list":
            with self.objects.changed:
                items = [manifest for manifest in self.objects.all(plural, namespace) if _chosen(manifest, query)]
                return {"items": items, "metadata": {"resourceVersion": str(self.objects.version)}}
        item = self.objects.get(plural, name, namespace)
        if item is None:
            raise StatusError(404, f'{plural} "{name}" not found')
        return item

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

    def _watch(self, request: BaseHTTPRequestHandler, plural: str, namespace: str, query: dict[str, str]) -> None:
        objects, generation = self.objects, self.generation
        last_version = int(query["resourceVersion"])
        end = time.monotonic() + int(query.get("timeoutSeconds", "60"))
        if last_version < objects.forgotten:
            raise StatusError(410, "too old resource version")
        send = chunked(request)
        while True:
            with objects.changed:
                objects.changed.wait_for(
                    lambda: objects.version != last_version or self.generation != generation,  # noqa: B023
                    max(0.0, min(1.0, end - time.monotonic())),
                )
                news = [entry for entry in objects.history[-500:] if entry[0] > last_version and entry[2] == plural]
                expired, version = objects.forgotten > last_version, objects.version
            if self.generation != generation:
                request.close_connection = True
                return  # in the middle of the stream
            if expired:
                status = {"kind": "Status", "code": 410, "message": "too old resource version"}
                send(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
                break
            for _, kind, _, body in news:
                if body["metadata"].get("namespace") == namespace and _chosen(body, query):
                    send(json.dumps({"type": kind, "object": body}).encode() + b"\n")
            last_version = version
            send(
                json.dumps(
                    {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(last_version)}}}
                ).encode()
                + b"\n"
            )
            if time.monotonic() >= end:
                break
        request.wfile.write(b"0\r\n\r\n")

    def _log(self, request: BaseHTTPRequestHandler, name: str, query: dict[str, str]) -> None:
        output = self.logs(name)
        if output is None:
            raise StatusError(404, f'pods "{name}" not found')
        generation = self.generation
        stream(request, output, query, lambda: self.generation != generation)


def _chosen(body: Object, query: dict[str, str]) -> bool:
    return matches(body, query.get("labelSelector", "")) and selected(body, query.get("fieldSelector", ""))
