"""HTTP servers of tests: a handler that reads and sends whole bodies, and a server that runs in a thread."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Prints nothing."""

    def body(self) -> bytes:
        """The body of the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        """Send bytes, or another value as JSON. A `_` in the name of a header is a `-`."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content_Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def running(server: type[BaseHTTPRequestHandler] | ThreadingHTTPServer) -> Iterator[str]:
    """The address of a server that answers while in the context."""
    if not isinstance(server, ThreadingHTTPServer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), server)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
