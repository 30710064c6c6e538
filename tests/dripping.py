"""An HTTP server that never ends a response and is never silent for long."""

import contextlib
import socket
import threading
from collections.abc import Iterator

HEAD = b"HTTP/1.1 200 OK\r\nETag: x\r\nLast-Modified: Wed, 25 Nov 2026 00:00:00 GMT\r\n"
REPLIES = {
    "status line": b"",
    "headers": HEAD,
    "body": HEAD + b"Content-Length: 100000\r\n\r\n",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
}


@contextlib.contextmanager
def dripping(reply: bytes) -> Iterator[str]:
    """The address of a server that sends `reply`, and then one byte ten times per second."""
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(reply)
            while not stop.wait(0.1):
                connection.sendall(b"1")

    def accept() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()
