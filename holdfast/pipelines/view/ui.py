"""MLflow's UI for this machine's tracking data, accessible only to the person who started it.

Every request needs a user name and a password (MLflow's app `basic-auth`). The password is in a file of mode 0600. No
database address is on a command line, where `ps` would show it.
"""

import importlib.util
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import typer

from holdfast.runtime.environment import home, tracking_uri
from holdfast.runtime.secrets import redact
from holdfast.runtime.signals import prompt_signals
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import AccessDeniedError, ExitCode, MissingError

USER = "holdfast"
PASSWORD_FILE = "mlflow-ui.password"  # noqa: S105 - the name of a file, under `home()`
_SETTINGS = """[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{users}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
"""


def serve(host: str, port: int) -> int:
    """Serve the UI until it is stopped, and return its exit code. For an MLflow server, only print its address.

    Raises MissingError without the package that MLflow's password check needs.
    """
    uri = tracking_uri()
    if uri.startswith(("http://", "https://")):
        print(f"MLflow is at {redact(uri)}")  # noqa: T201
        return int(ExitCode.OK)
    if importlib.util.find_spec("flask_wtf") is None:
        raise MissingError(
            "MLflow's UI is served with a password, which needs Flask-WTF; install holdfast[tracking] (or mlflow[auth])"
        )
    from holdfast.tracking import connect

    free_port = _free(host, port)
    print("MLflow starts, which takes some seconds", flush=True)  # noqa: T201
    connect(uri)  # creates the database, so that an empty UI opens before the first run
    password = password_of(home() / PASSWORD_FILE)
    command = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    command += ["--host", host, "--port", str(free_port), "--uvicorn-opts", "--log-level warning"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM also ends the server
    with prompt_signals(), temporary_folder("ui") as folder:  # of mode 0700
        users = Path(folder) / "users.db"
        settings = Path(folder) / "basic_auth.ini"
        settings.write_text(_SETTINGS.format(users=users))
        with subprocess.Popen(command, env=_environment(uri, settings, password)) as server:
            try:
                while server.poll() is None and not _answers(host, free_port):
                    time.sleep(0.1)
                if server.poll() is None:
                    login = f"user {USER}, password in {home() / PASSWORD_FILE}"
                    print(f"MLflow: http://{host}:{free_port}  ({login}; end it with Ctrl-C)", flush=True)  # noqa: T201
                return server.wait()
            except KeyboardInterrupt:
                server.terminate()
                server.wait()
                return int(ExitCode.OK)


def password_of(path: Path) -> str:
    """The password in a file that only its owner can read; created if missing.

    Raises AccessDeniedError for a file that other users could have read or written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
    with suppress(OSError):
        read_descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(read_descriptor) as file:
            status = os.fstat(file.fileno())
            private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
            if private and (password := file.readline().strip()):
                return password
    raise AccessDeniedError(f"{path}: is not a file that only you can read; delete it, and a new one is made")


def _environment(uri: str, settings: Path, password: str) -> dict[str, str]:
    """The environment of the server. It holds secrets that must not be on the command line; only its
    owner can read it.
    """
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
    }
    environment.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")  # workers of 2 GB that nothing here uses
    environment.setdefault("PYTHONWARNINGS", "ignore")  # otherwise each server worker repeats a warning of Starlette
    return environment


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
