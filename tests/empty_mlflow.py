"""An empty MLflow. Creating its database takes four CPU seconds, so one process does it, and tests copy it."""

import fcntl
import functools
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from holdfast.tracking import connect


def place(home: Path, name: str = "mlflow.db") -> None:
    """Give a HOLDFAST_HOME, or a folder with another file, an empty MLflow, unless it already has one."""
    database = home / name
    if not database.exists():
        home.mkdir(parents=True, exist_ok=True)
        database.write_bytes(_empty())


@functools.cache
def _empty() -> bytes:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _created()
    shared = Path(tempfile.gettempdir()) / f"holdfast-empty-mlflow-{run}.db"  # of the processes of this test run
    with shared.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        database = file.read()
        if not database:
            for earlier in set(shared.parent.glob("holdfast-empty-mlflow-*.db")) - {shared}:
                with suppress(OSError):
                    earlier.unlink()
            database = _created()
            file.write(database)
        return database


def _created() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "mlflow.db"
        connect(f"sqlite:///{database}")
        return database.read_bytes()
