"""A server that drips: each operation ends by its deadline, though no read ever times out."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from holdfast.components.spec.errors import StoreUnreachableError
from holdfast.components.store import Store, open_store, s3_deadlines
from holdfast.pipelines.chaos.proxy import FaultyProxy

HEAD = b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Wed, 25 Nov 2026 00:00:00 GMT\r\n"
REPLIES = {
    "status line": b"",
    "headers": HEAD,
    "body": HEAD + b"Content-Length: 100000\r\n\r\n",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
}
OPERATIONS = {
    "get": lambda store: store.get("k"),
    "range": lambda store: store.get("k", 0, 50_000),
    "stat": lambda store: store.stat("k"),
    "list": lambda store: list(store.list("")),
    "put": lambda store: store.put("k", b"1"),
    "delete": lambda store: store.delete("k"),
}


@contextlib.contextmanager
def dripping(reply: bytes) -> Iterator[str]:
    """The address of a server that answers with `reply`, and then with a byte ten times a second."""
    stopped = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(reply)
            while not stopped.wait(0.1):
                connection.sendall(b"1")

    def accept() -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError):
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stopped.set()
            thread.join()


@pytest.mark.parametrize(
    ("reply", "operation"),
    [
        ("status line", "put"),
        ("headers", "stat"),
        ("headers", "delete"),
        ("body", "get"),
        ("body", "list"),
        ("chunks", "list"),
    ],
)
def test_an_operation_on_a_server_that_drips_ends(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, reply: str, operation: str
) -> None:
    monkeypatch.setattr(s3_deadlines, "LEAST_RATE", 2**20)
    with dripping(REPLIES[reply]) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StoreUnreachableError, match="no whole reply"):
            OPERATIONS[operation](open_store(s3_url, deadline=0.6))


def test_a_request_that_is_in_time_is_left_alone(proxied: Store, proxy: FaultyProxy, large: bytes) -> None:
    proxied.put("big", large)
    assert proxied.get("big") == large
    assert not s3_deadlines._attempts
