"""Where things are when the spec does not say: the few environment variables of Holdfast, resolved at the edge.

`HOLDFAST_HOME` (default `~/.holdfast`) holds the embedded defaults: a folder store, an SQLite MLflow, logs and caches.
`HOLDFAST_STORE` and `MLFLOW_TRACKING_URI` replace the first two by real servers.
"""

from __future__ import annotations

import os
from pathlib import Path

from components.spec.tree import Spec


def home() -> Path:
    """The folder of the embedded defaults, absolute."""
    return Path(os.environ.get("HOLDFAST_HOME") or "~/.holdfast").expanduser().absolute()


def store_url(spec: Spec | None = None) -> str:
    """The root of the store: the spec's, else HOLDFAST_STORE, else a folder under `home()`."""
    if spec is not None and spec.store:
        return spec.store
    return os.environ.get("HOLDFAST_STORE") or f"file://{home() / 'store'}"


def tracking_uri() -> str:
    """The MLflow server: MLFLOW_TRACKING_URI, else an SQLite file under `home()`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def cache_dir() -> Path:
    """Where shards read from S3 are kept, under `home()`."""
    return home() / "cache"


def log_dir(run_id: str) -> Path:
    """Where the logs of a run on this machine are kept, under `home()`."""
    return home() / "logs" / run_id
