"""An HTTP proxy that injects faults into the traffic of a server.

    with FaultyProxy(endpoint) as proxy:            # proxy.url goes where the endpoint went
        fault = proxy.inject(lose_reply(), method="PUT", path="checkpoints/", times=1)
        ...
        assert fault.hits == 1

Traffic without a fault passes unchanged. Everything is deterministic except `chance`, which uses a seeded generator.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Request:
    """An incoming request. `receive(n)` reads at most `n` bytes of the body on demand."""

    method: str
    path: str  # including the query
    headers: dict[str, str]
    receive: Callable[[int], bytes]

    @functools.cached_property
    def body(self) -> bytes:
        """The rest of the body."""
        return self.receive(int(self.headers.get("Content-Length") or 0))


@dataclass
class Reply:
    """An outgoing reply.

    - `cut`: hang up after this many bytes of the body; with `silent`, instead send nothing more until that is set.
    - `reset`: hang up without a reply.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    cut: int | None = None
    silent: threading.Event | None = None
    reset: bool = False


Forward = Callable[[Request], Reply]
Act = Callable[[Request, Forward], Reply]


def answer(status: int, code: str = "InjectedError", retry_after: int | None = None) -> Act:
    """Reply with an S3 error; the server never gets the request. `retry_after`: seconds in the Retry-After header."""

    def act(request: Request, forward: Forward) -> Reply:
        body = (
            b""
            if request.method == "HEAD"
            else f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        )
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        headers += [] if retry_after is None else [("Retry-After", str(retry_after))]
        return Reply(status, headers, body)

    return act


def reset(after: int | None = None) -> Act:
    """Reset the connection; the server never gets the request.

    `after`: reset after this many bytes of the body, while the rest is in transit; default: after the whole body.
    """

    def act(request: Request, forward: Forward) -> Reply:
        _ = request.body if after is None else request.receive(after)
        return Reply(0, [], b"", reset=True)

    return act


def stall(size: int, released: threading.Event) -> Act:
    """Pass the first `size` bytes of the reply's body, then keep the connection open silently until
    `released` is set.
    """

    def act(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.cut, reply.silent = size, released
        return reply

    return act


def deaf(released: threading.Event) -> Act:
    """Do not read the request's body until `released` is set, then hang up. The sender blocks meanwhile."""

    def act(request: Request, forward: Forward) -> Reply:
        released.wait()
        return Reply(0, [], b"", reset=True)

    return act


def lose_reply() -> Act:
    """Let the server apply the request, then reset the connection."""

    def act(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.reset = True
        return reply

    return act


def answer_after(status: int, code: str = "InjectedError") -> Act:
    """Let the server apply the request, then reply with an error."""

    def act(request: Request, forward: Forward) -> Reply:
        forward(request)
        return answer(status, code)(request, forward)

    return act


def truncate(size: int) -> Act:
    """Pass only the first `size` bytes of the reply's body, then hang up."""

    def act(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        reply.cut = size
        return reply

    return act


def flip(at: int) -> Act:
    """Change one bit of byte `at` of the reply's body (counted from the end when negative)."""

    def act(request: Request, forward: Forward) -> Reply:
        reply = forward(request)
        content = bytearray(reply.body)
        content[at] ^= 1
        reply.body = bytes(content)
        return reply

    return act


def hold(released: threading.Event, *, after: bool = False) -> Act:
    """Hold the request until `released` is set, before the server gets it or, with `after`, before the reply leaves."""

    def act(request: Request, forward: Forward) -> Reply:
        reply = forward(request) if after else None
        _ = request.body
        released.wait()
        return reply if reply is not None else forward(request)

    return act


def slow(seconds: float) -> Act:
    """Delay every request."""

    def act(request: Request, forward: Forward) -> Reply:
        _ = request.body
        threading.Event().wait(seconds)
        return forward(request)

    return act


@dataclass
class Injection:
    """An active fault. `hits` counts affected requests; `hit` is set at the first."""

    act: Act
    method: str | None
    path: str
    skip: int
    times: int | None
    chance: float
    generator: random.Random
    hits: int = 0
    hit: threading.Event = field(default_factory=threading.Event)

    def takes(self, request: Request) -> bool:
        """Whether this fault affects the request. Counts it if so."""
        if self.method not in (None, request.method) or self.path not in request.path:
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.chance < 1 and self.generator.random() >= self.chance:
            return False
        self.hits += 1
        self.hit.set()
        return True


class FaultyProxy:
    """The proxy in front of `endpoint`, in threads of this process, on a free port of 127.0.0.1."""

    def __init__(self, endpoint: str, *, seed: int = 0) -> None:
        self._target = urlsplit(endpoint).netloc
        self._lock = threading.Lock()
        self._injections: list[Injection] = []
        self._generator = random.Random(seed)  # noqa: S311 - a schedule
        self.requests: list[str] = []  # "PUT /bucket/key" for every request, in order
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True, name="faulty-proxy"
        )

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def inject(
        self,
        act: Act,
        *,
        method: str | None = None,
        path: str = "",
        skip: int = 0,
        times: int | None = 1,
        chance: float = 1.0,
    ) -> Injection:
        """Inject a fault into requests of `method` whose path contains `path`.

        Skips `skip` of them, then affects `times` (None: all), each with probability `chance`. Of several faults, the
        earliest one that affects a request applies.
        """
        injection = Injection(act, method, path, skip, times, chance, self._generator)
        with self._lock:
            self._injections.append(injection)
        return injection

    def heal(self) -> None:
        """Remove every fault."""
        with self._lock:
            self._injections.clear()

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _forward(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection(self._target)
        try:
            connection.request(request.method, request.path, request.body, request.headers)
            reply = connection.getresponse()
            hop_headers = ("transfer-encoding", "connection", "keep-alive", "date", "server")
            headers = [(name, value) for name, value in reply.getheaders() if name.lower() not in hop_headers]
            body = reply.read()
            if not any(name.lower() == "content-length" for name, _ in headers):
                headers.append(("Content-Length", str(len(body))))
            return Reply(reply.status, headers, body)
        finally:
            connection.close()

    def _reply_to(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(f"{request.method} {request.path}")
            match = next((injection for injection in self._injections if injection.takes(request)), None)
        return match.act(request, self._forward) if match else self._forward(request)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                # Some clients write names in small letters.
                headers = {name.title(): value for name, value in self.headers.items() if name.lower() != "expect"}
                left = int(self.headers.get("Content-Length") or 0)

                def receive(size: int) -> bytes:
                    nonlocal left
                    requested = min(size, left)
                    content = self.rfile.read(requested)
                    left -= len(content)
                    if len(content) < requested:
                        raise ConnectionError("the client left")
                    return content

                reply = proxy._reply_to(Request(self.command, self.path, headers, receive))
                if reply.reset:
                    self._hang_up()
                    return
                receive(left)  # otherwise it would be parsed as the next request
                self.send_response_only(reply.status)
                for name, value in reply.headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body if reply.cut is None else reply.body[: reply.cut])
                if reply.cut is not None:
                    self.wfile.flush()
                    if reply.silent is not None:
                        reply.silent.wait()
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815 - the base class's names

            def _hang_up(self) -> None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client disconnected
                    super().handle()

            def finish(self) -> None:
                with contextlib.suppress(OSError):
                    super().finish()

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
