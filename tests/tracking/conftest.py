"""An MLflow on SQLite for each test, and a store that contains a run."""

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import requests
from urllib3.util import Retry

from holdfast.store import Store, open_store
from tests import empty_mlflow, warm
from tests.ports import free_port
from tests.tracking import made


@pytest.fixture
def bare_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty HOLDFAST_HOME."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "HOLDFAST_STORE", "HOLDFAST_WEBHOOK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOLDFAST_HOME", str(home))
    return home


@pytest.fixture
def home(bare_home: Path) -> Path:
    """A HOLDFAST_HOME with an empty MLflow."""
    empty_mlflow.place(bare_home)
    return bare_home


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store that holds the dataset of the run."""
    store = open_store(f"file://{tmp_path / 'store'}")
    made.write_dataset(store)
    return store


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """A real MLflow server over HTTP; with the same folder it has its earlier data.

    `mlflow server` sets these variables and starts the same application. It would import MLflow twice for that.
    """
    empty_mlflow.place(folder, "server.db")
    command = [sys.executable, "-m", "uvicorn", "mlflow.server.fastapi_app:app"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    database = f"sqlite:///{folder / 'server.db'}"
    environment = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "_MLFLOW_SERVER_FILE_STORE": database,
        "_MLFLOW_SERVER_REGISTRY_STORE": database,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
    }
    with (folder / "server.log").open("ab") as log:
        server = warm.popen(command, environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        with requests.Session() as session:
            retry = Retry(total=None, connect=600, read=3, backoff_factor=0.1, backoff_max=0.5)  # five minutes
            session.mount("http://", requests.adapters.HTTPAdapter(max_retries=retry))
            assert session.get(f"{url}/health", timeout=120).ok
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")  # a busy machine answers slowly
            yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A real MLflow server for the tests of a file, its folder and its URL."""
    folder = tmp_path_factory.mktemp("mlflow-server")
    with mlflow_server(folder, free_port()) as url:
        yield folder, url


@pytest.fixture
def server(lasting_server: tuple[Path, str], bare_home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty real MLflow server, which MLFLOW_TRACKING_URI names."""
    folder, url = lasting_server
    with closing(sqlite3.connect(folder / "server.db", timeout=120)) as database, database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in {*tables} - {"alembic_version", "workspaces"}:
            database.execute(f'DELETE FROM "{table}"' + (" WHERE experiment_id != 0" if table == "experiments" else ""))
    shutil.rmtree(folder / "artifacts", ignore_errors=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    return url
