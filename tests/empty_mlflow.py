"""An empty MLflow. Creating its database takes a second, so tests copy it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from holdfast.tracking import connect


def place(home: Path) -> None:
    """Give a HOLDFAST_HOME an empty MLflow, unless it already has one."""
    database = home / "mlflow.db"
    if not database.exists():
        home.mkdir(parents=True, exist_ok=True)
        database.write_bytes(_empty())


@functools.cache
def _empty() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "mlflow.db"
        connect(f"sqlite:///{database}")
        return database.read_bytes()
