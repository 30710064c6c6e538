"""MLflow's UI on what this machine tracks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import typer

from holdfast.components.runtime.environment import tracking_uri
from holdfast.components.runtime.secrets import redact
from holdfast.components.spec.errors import ExitCode


def serve(host: str, port: int) -> int:
    """Serve the UI until it is ended, and return its exit code; for an MLflow server, only say where it is."""
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        print(f"MLflow is at {redact(uri)}")  # noqa: T201
        return int(ExitCode.OK)
    from holdfast.components.tracking import connect

    chosen = _free(host, port)
    print("MLflow starts, which takes some seconds", flush=True)  # noqa: T201
    connect(uri)  # creates the database, so that an empty UI opens before the first run
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--host", host, "--port", str(chosen)]
    command += ["--uvicorn-opts", "--log-level warning"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR"}
    environment.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # workers of 2 GB, for what nothing here uses
    environment.setdefault("PYTHONWARNINGS", "ignore")  # each of the server's workers would say the same of Starlette
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the server as well
    with subprocess.Popen(command, env=environment) as server:
        try:
            while server.poll() is None and not _answers(host, chosen):
                time.sleep(0.1)
            if server.poll() is None:
                print(f"MLflow: http://{host}:{chosen}  (end it with Ctrl-C)", flush=True)  # noqa: T201
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
            return int(ExitCode.OK)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _free(host: str, port: int) -> int:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, port))
        except OSError as error:
            raise typer.BadParameter(
                f"--port {port}: cannot listen there on {host}: {error.strerror}; give another one, or --port 0 for any"
            ) from None
        return int(candidate.getsockname()[1])
