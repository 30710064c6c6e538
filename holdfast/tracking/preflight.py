"""A check for permanent failures of MLflow, before a training is paid for.

It answers within seconds, without importing MLflow. An unreachable MLflow is no failure: it may be back when it is
needed.
"""

import base64
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, urlsplit

from holdfast.runtime import deadlines
from holdfast.runtime.environment import tracking_uri
from holdfast.runtime.secrets import redact
from holdfast.spec import Spec
from holdfast.spec.errors import AccessDeniedError, DataError, MissingError, Problem, SpecError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.tracking.failures import NEEDS_RIGHTS

SECONDS = 5.0
LARGEST = 2**16  # limit of an answer in bytes
FILES_ALLOWED = "MLFLOW_ALLOW_FILE_STORE"  # a variable of MLflow
_DATABASES = ("postgresql", "mysql", "mssql")
_SQLITE = "sqlite:///"


def require_usable(spec: Spec, uri: str | None = None) -> None:
    """Check for permanent failures of this spec at MLflow's `uri` (default: `tracking_uri()`). Raises SpecError for an
    address that cannot be used, AccessDeniedError, and MissingError for a deleted experiment."""
    uri = uri or tracking_uri()
    require_address(uri)
    if uri.startswith(_SQLITE):
        experiment = _in_sqlite(Path(uri.removeprefix(_SQLITE).partition("?")[0]), spec.experiment)
    elif uri.startswith(("http://", "https://")):
        experiment = _on_server(uri, spec.experiment)
    else:
        experiment = None
    if experiment is not None and experiment[1] == "deleted":
        raise MissingError(deleted(spec.experiment, experiment[0]))


def require_address(uri: str) -> None:
    """Raise SpecError for an address that MLflow refuses, or that needs a driver that is not installed."""
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    if scheme in ("", "file") and os.environ.get(FILES_ALLOWED, "").lower() not in ("true", "1"):
        problem = Problem(
            "MLFLOW_TRACKING_URI",
            redact(uri),
            "is a folder, and MLflow keeps nothing in folders any more",
            "name an MLflow server or a file (sqlite:///FOLDER/mlflow.db), or unset it: mlflow.db in HOLDFAST_HOME",
        )
        raise SpecError([problem], "environment")
    if scheme.partition("+")[0] in _DATABASES:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError

        try:
            make_url(uri).get_dialect().import_dbapi()
        except (ImportError, NoSuchModuleError, ArgumentError) as error:
            problem = Problem(
                "MLFLOW_TRACKING_URI",
                redact(uri),
                f"needs a database driver that is not installed: {error}",
                "install it where Holdfast runs, or name another one (postgresql+psycopg://… comes with "
                "holdfast[tracking])",
            )
            raise SpecError([problem], "environment") from None


def deleted(experiment: str, experiment_id: str) -> str:
    """The message for a deleted experiment, with the remedy."""
    return (
        f"registration.experiment: {experiment!r} is deleted in MLflow; restore it "
        f"(mlflow experiments restore --experiment-id {experiment_id}) or name another one"
    )


def _in_sqlite(database: Path, experiment: str) -> tuple[str, str] | None:
    """Id and stage of the experiment in an SQLite file; None if it does not exist, or cannot be read now. Raises
    AccessDeniedError if this user may not write to it, or not to its folder."""
    if not database.exists():
        return None
    for path in (database, database.parent):
        if not os.access(path, os.R_OK | os.W_OK):
            raise AccessDeniedError(f"MLflow in {database}: {path} may not be written; {NEEDS_RIGHTS}")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=SECONDS)) as connection:
            row = connection.execute(
                "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ?", (experiment,)
            ).fetchone()
    except sqlite3.Error:
        return None
    return None if row is None else (str(row[0]), str(row[1]))


def _on_server(uri: str, experiment: str) -> tuple[str, str] | None:
    """Id and stage of the experiment on a server; None if it does not exist, or the server does not answer now. Raises
    AccessDeniedError."""
    import urllib3

    parts = urlsplit(uri)
    headers = {"Authorization": value} if (value := _authorization(parts.username, parts.password)) else {}
    host = parts.netloc.rpartition("@")[2]
    root = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
    unchecked = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1")
    try:
        with (
            urllib3.PoolManager(
                cert_reqs="CERT_NONE" if unchecked else "CERT_REQUIRED",
                ca_certs=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"),
            ) as http,
            deadlines.within(SECONDS),
        ):
            deadlines.bound(http)
            answer = http.request(
                "GET",
                f"{root}/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(experiment, safe='')}",
                headers=headers,
                timeout=urllib3.Timeout(total=SECONDS),
                retries=False,
                preload_content=False,
            )
            data = answer.read(LARGEST)
    except (urllib3.exceptions.HTTPError, OSError):
        return None
    if answer.status in (401, 403) and not _signs_otherwise():
        raise AccessDeniedError(
            f"MLflow at {redact(root)}: status {answer.status}; set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    try:
        fields = parse_json_object(data, f"MLflow at {redact(root)}")["experiment"]
        return str(fields["experiment_id"]), str(fields["lifecycle_stage"])
    except (DataError, KeyError, TypeError):
        return None


def _signs_otherwise() -> bool:
    """Whether MLflow's client authenticates in a way that this module does not know."""
    names = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_TRACKING_CLIENT_CERT_PATH")
    return any(map(os.environ.get, names)) or Path("~/.mlflow/credentials").expanduser().exists()


def _authorization(user: str | None, password: str | None) -> str:
    """The header that MLflow's own client would send."""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or user
    password = os.environ.get("MLFLOW_TRACKING_PASSWORD") or password
    if user and password:
        return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    return f"Bearer {token}" if token else ""
