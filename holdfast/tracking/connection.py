"""The connection to an MLflow server, or to the embedded SQLite file: quiet, bounded in time, without global state.

Data goes only to the tracking URI. No call waits for minutes. Two processes may open a new SQLite file concurrently. A
failure of MLflow, or of a plug-in that it loads, is a TrackingUnavailable with the matching exit code, and without
credentials in its text.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.runtime.environment import home, make_folder, tracking_uri
from holdfast.runtime.locks import NO_LOCKS, lock_within, no_locks, open_lock
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import ExitCode, HoldfastError, HungError, SpecError
from holdfast.store.durable import FILE_MODE
from holdfast.tracking.artifacts import bounded
from holdfast.tracking.failures import is_bug, meaning
from holdfast.tracking.preflight import require_address

if TYPE_CHECKING:
    from mlflow import MlflowClient

# An MLflow client whose calls always end, even when the server only sends a byte now and then.
#
# MLflow's timeout bounds the silence between two bytes, and its sessions have no public hook for a deadline. So each
# call of the client runs in a thread, and the caller waits no longer than the total time of all its tries.

TIMEOUT, RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
SPARE_SECONDS = 30.0  # allowance for the pauses between tries, and a call of several requests

_inside = threading.local()


def total_seconds() -> float:
    """The time limit of a call, all tries included; twice the settings of MLflow, for calls of two requests."""
    return 2 * float(os.environ[TIMEOUT]) * (1 + int(os.environ[RETRIES])) + SPARE_SECONDS


@functools.cache
def bounded_client() -> type[MlflowClient]:
    """The class of MLflow's client, with calls that end. They raise TimeoutError."""
    from mlflow import MlflowClient

    class BoundedClient(MlflowClient):
        def __getattribute__(self, name: str) -> Any:
            attribute = super().__getattribute__(name)
            if name.startswith("_") or not callable(attribute) or getattr(_inside, "call", False):
                return attribute
            return functools.partial(_call, attribute)

    return BoundedClient


def _call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        _inside.call = True  # nested calls of the method need no further thread
        return method(*args, **kwargs)

    return bounded(run, f"MLflow's {method.__name__}", total_seconds())


_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
# MLflow reads these when it is imported or at each request; a person's settings stay.
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    _TIMEOUT: "20",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "PGCONNECT_TIMEOUT": "20",  # seconds; libpq waits for as long as the system does
}
_SET_BY_PERSON = frozenset(os.environ)
BUSY_SECONDS = 20.0  # limit of the wait for another writer; MLflow itself waits as long
LOCK_SECONDS = 600.0  # limit; creating the schema of a database takes seconds
CONNECT_SECONDS = 30.0  # limit for connecting to a database
_DATABASES = ("mysql", "mssql")  # in addition to SQLite and PostgreSQL
_SQLITE = "sqlite:///"
_LOCK = int.from_bytes(b"holdfast", "big") >> 1  # PostgreSQL advisory lock for creating MLflow's tables


class TrackingUnavailable(HoldfastError):  # noqa: N818 - the state of a server, not a mistake
    """MLflow did not answer, or refused. The store has all data: the same call later catches up."""

    exit_code = ExitCode.STORE_UNREACHABLE


def connect(uri: str | None = None, timeout: int | None = None) -> MlflowClient:
    """A client of the MLflow at `uri` (default: `tracking_uri()`). Raises TrackingUnavailable if an SQLite file cannot
    be opened. A server is contacted only by the first call.

    `timeout`, in seconds, replaces the default of this process for one request, unless a person has set another one.
    """
    uri = uri or tracking_uri()
    if timeout is not None and _TIMEOUT not in _SET_BY_PERSON:
        os.environ[_TIMEOUT] = str(timeout)
    try:
        require_address(uri)
    except SpecError as error:
        failure = TrackingUnavailable(str(error))
        failure.exit_code = error.exit_code
        raise failure from None
    with translated(uri), _alone(uri):
        kind = quiet_mlflow()
        registry = registry_uri(uri)
        if any(address.startswith(("http://", "https://")) for address in (uri, registry)):
            kind = bounded_client()
        return kind(tracking_uri=uri, registry_uri=registry)


def registry_uri(uri: str) -> str:
    """The registry of models of the MLflow at `uri`: MLFLOW_REGISTRY_URI may name another one."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or uri


def quiet_mlflow() -> type[MlflowClient]:
    """Import MLflow, without log output and with bounded timeouts."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"])  # its import sets INFO
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return MlflowClient


def artifact_location(uri: str) -> str | None:
    """The artifact folder of an MLflow without a server (its own default is the current folder); None leaves it to the
    server."""
    return (home() / "mlflow-artifacts").as_uri() if uri.startswith((_SQLITE, "postgresql")) else None


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn any error of MLflow and its plug-ins into a TrackingUnavailable that names the MLflow, with the matching
    exit code. Holdfast's own errors pass unchanged."""
    quiet_mlflow()
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        if is_bug(error):
            raise
        raise unavailable(error, uri) from error


def unavailable(error: Exception, uri: str) -> TrackingUnavailable:
    """The error for a failure of the MLflow at `uri`."""
    first_line = redact(str(error)).strip().split("\n", 1)[0][:500] or type(error).__name__
    code, remedy = meaning(error)
    failure = TrackingUnavailable(f"MLflow at {redact(uri)}: {first_line}; {remedy}, then run the same command again")
    failure.exit_code = code
    return failure


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process at a time open a database: opening creates the schema, which two cannot do concurrently."""
    if uri.startswith("postgresql"):
        with _postgresql_lock(uri):
            yield
        return
    if uri.startswith(_DATABASES):  # MLflow itself would retry for minutes
        bounded(lambda: _open_database(uri), "connecting to the database", CONNECT_SECONDS)
    if not uri.startswith(_SQLITE):
        yield
        return
    database = Path(uri.removeprefix(_SQLITE).partition("?")[0])
    make_folder(database.parent)
    path = database.with_name(database.name + ".lock")
    with open(open_lock(path), "rb") as file:  # noqa: PTH123 - a descriptor
        try:
            free = lock_within(file.fileno(), LOCK_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            remedy = "set MLFLOW_TRACKING_URI to a server, or HOLDFAST_HOME to a folder on a disk of this machine"
            raise no_locks(database, error, remedy) from None
        if not free:
            raise HungError(f"{path}: another process has held it for {LOCK_SECONDS:g} s; end that one")
        if not database.exists():
            _create(database)
        with closing(sqlite3.connect(database, timeout=BUSY_SECONDS)) as connection:  # MLflow would retry for minutes
            connection.execute("PRAGMA schema_version")
        yield


@contextmanager
def _postgresql_lock(uri: str) -> Iterator[None]:
    """A lock held by one of all processes that use the database. It ends with the connection, even if the process is
    killed. The first holder without a schema creates it."""
    from mlflow import MlflowClient
    from sqlalchemy import create_engine, inspect, text

    engine = create_engine(uri)
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK})
            connection.commit()
            if not inspect(engine).has_table("experiments"):
                MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
            yield
    finally:
        engine.dispose()


def _open_database(uri: str) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(uri)
    try:
        engine.connect().close()
    finally:
        engine.dispose()


def _create(database: Path) -> None:
    """Create an empty MLflow, completely or not at all: MLflow never repairs a partial schema, such as after a full
    disk."""
    from mlflow import MlflowClient

    unfinished = database.with_name(f"{database.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch(FILE_MODE)  # SQLite's own mode lets no group write
        with closing(sqlite3.connect(unfinished)) as connection:
            connection.execute("PRAGMA schema_version")
        MlflowClient(tracking_uri=f"{_SQLITE}{unfinished}", registry_uri=f"{_SQLITE}{unfinished}").search_experiments()
        unfinished.replace(database)
    finally:
        unfinished.unlink(missing_ok=True)
