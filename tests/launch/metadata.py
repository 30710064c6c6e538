"""The metadata service of a cloud, over real HTTP on this machine; the test sets its answers."""

import json
import threading
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.http_server import QuietHandler, running

TOKEN = "token-1"
MACHINE = "machine-0"


class Metadata:
    """`with Metadata() as cloud`: the paths of all three clouds under one address."""

    def __init__(self) -> None:
        self.action: dict[str, str] | None = None  # of AWS
        self.rebalance = False
        self.events: list[dict[str, Any]] = []  # of Azure
        self.token = TOKEN
        self.broken = 0  # requests that are answered 503
        self.requests: list[str] = []  # method, path and query of each request
        self.waited = threading.Event()  # a client waits for a change at GCP
        self._preempted, self._changed = False, threading.Condition()
        service = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                service._answer(self)

            do_PUT = do_GET  # noqa: N815

        self._running = running(Handler)

    def __enter__(self) -> Self:
        self.url = self._running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.__exit__(None, None, None)

    def preempt(self) -> None:
        """GCP takes the machine back. A client that asks after one was notified is on another machine."""
        with self._changed:
            self._preempted = True
            self._changed.notify_all()

    def _answer(self, request: QuietHandler) -> None:
        self.requests.append(f"{request.command} {request.path}")
        parts = urlsplit(request.path)
        if self.broken:
            self.broken -= 1
            self._say(request, 503, "busy")
        elif parts.path.startswith("/latest/"):
            self._aws(request, parts.path)
        elif parts.path == "/computeMetadata/v1/instance/preempted" and request.headers["Metadata-Flavor"] == "Google":
            self._gcp(request, parse_qs(parts.query))
        elif request.headers["Metadata"] == "true" and parts.path.startswith("/metadata/"):
            self._azure(request, parts.path)
        else:
            self._say(request, 403, "no")

    def _aws(self, request: QuietHandler, path: str) -> None:
        if path == "/latest/api/token":
            has_ttl = request.command == "PUT" and request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self._say(request, 200 if has_ttl else 400, self.token)
        elif request.headers["X-aws-ec2-metadata-token"] != self.token:
            self._say(request, 401, "")
        elif path.endswith("/spot/instance-action") and self.action is not None:
            self._say(request, 200, json.dumps(self.action))
        elif path.endswith("/events/recommendations/rebalance") and self.rebalance:
            self._say(request, 200, json.dumps({"noticeTime": "2026-11-22T08:22:00Z"}))
        else:
            self._say(request, 404, "")

    def _gcp(self, request: QuietHandler, query: dict[str, list[str]]) -> None:
        with self._changed:
            if query.get("wait_for_change") == ["true"]:
                self.waited.set()
                seconds = float(query["timeout_sec"][0])
                self._changed.wait_for(lambda: query["last_etag"] != [self._tag()], seconds)
            tag, value = self._tag(), "TRUE" if self._preempted else "FALSE"
            self._preempted = False
        self._say(request, 200, value, ETag=tag)

    def _tag(self) -> str:
        return f"tag+{int(self._preempted)}/="

    def _azure(self, request: QuietHandler, path: str) -> None:
        if path == "/metadata/instance/compute/name":
            self._say(request, 200, MACHINE)
        else:
            self._say(request, 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}))

    def _say(self, request: QuietHandler, status: int, text: str, **headers: str) -> None:
        request.answer(status, text.encode(), **headers)
