"""MLflow's UI on what this machine tracks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from components.spec.environment import tracking_uri
from components.spec.errors import ExitCode, Problem, SpecError


def serve(host: str, port: int) -> int:
    """Serve the UI until it is ended, and return its exit code; for an MLflow server, only say where it is."""
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        from components.tracking import redact

        print(f"MLflow is at {redact(uri)}")  # noqa: T201
        return int(ExitCode.OK)
    from components.tracking import connect

    connect(uri)  # creates the database, so that an empty UI opens before the first run
    chosen = _free(host, port)
    print(f"MLflow: http://{host}:{chosen}  (end it with Ctrl-C)", flush=True)  # noqa: T201
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", host, "--port", str(chosen)]
    with subprocess.Popen(command, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}) as server:
        try:
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
            return int(ExitCode.OK)


def _free(host: str, port: int) -> int:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, port))
        except OSError as error:
            message = f"cannot be listened on at {host}: {error.strerror}"
            raise SpecError([Problem("--port", port, message, "give another one, or --port 0 for any")], "ui") from None
        return int(candidate.getsockname()[1])
