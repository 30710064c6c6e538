"""An S3 server on this machine: moto over HTTP, in a thread of this process, on a free port of 127.0.0.1.

moto checks the condition of a write and then writes, with a gap between. A lock around the writes closes the gap, as in
real S3, so exactly one of many conditional writers wins.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class S3Server:
    """`with S3Server() as endpoint`: the URL of a running, empty S3 server."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request
        self._application = DomainDispatcherApplication(create_backend_app)
        self._writing = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=MotoRequestHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True, name="s3")

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._application(environ, start_response)
        with self._writing:
            return self._application(environ, start_response)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
