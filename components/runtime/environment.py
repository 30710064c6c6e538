"""Where things are when the spec does not say: the few environment variables of Holdfast, resolved at the edge.

`HOLDFAST_HOME` (default `~/.holdfast`) holds the embedded defaults: a folder store, an SQLite MLflow, logs and caches.
`HOLDFAST_STORE` and `MLFLOW_TRACKING_URI` replace the first two by real servers.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from holdfast.components.spec.errors import Problem, SpecError
from holdfast.components.spec.tree import Spec

IMAGE_VARIABLE = "HOLDFAST_IMAGE"  # the image that a rank runs in, as its pod names it
DEFAULT_CACHE_GIB = "32"


def home() -> Path:
    """The folder of the embedded defaults, absolute."""
    return Path(os.environ.get("HOLDFAST_HOME") or "~/.holdfast").expanduser().absolute()


def store_url(spec: Spec | None = None) -> str:
    """The root of the store: the spec's, else HOLDFAST_STORE, else a folder under `home()`."""
    if spec is not None and spec.store:
        return spec.store
    return os.environ.get("HOLDFAST_STORE") or (home() / "store").as_uri()


def tracking_uri() -> str:
    """The MLflow server: MLFLOW_TRACKING_URI, else an SQLite file under `home()`. Raises SpecError for a folder that no
    SQLite URL can name: MLflow reads one part of it quoted and another as it is."""
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        return given
    path = str(home() / "mlflow.db")
    if set("%?") & set(path):
        problem = Problem(
            "HOLDFAST_HOME", str(home()), "has a % or a ? in it", "name a folder without, or set MLFLOW_TRACKING_URI"
        )
        raise SpecError([problem], "environment")
    return f"sqlite:///{path}"


def mlflow_is_there() -> bool:
    """Whether MLflow can know anything: an SQLite file that does not exist cannot. A server is not asked."""
    kind, _, path = tracking_uri().partition(":///")
    return not kind.startswith("sqlite") or Path(path.partition("?")[0]).exists()


def cache_dir() -> Path:
    """Where what is read from S3 is kept, under `home()`."""
    return home() / "cache"


def cache_bytes() -> int:
    """How much of the datasets in S3 this machine keeps: HOLDFAST_CACHE_GIB, in GiB. Raises SpecError."""
    given = os.environ.get("HOLDFAST_CACHE_GIB") or DEFAULT_CACHE_GIB
    try:
        size = float(given)
    except ValueError:
        size = math.nan
    if not 0 <= size < 2**30:
        problem = Problem(
            "HOLDFAST_CACHE_GIB", given, "is no number of GiB", f"write a number, such as {DEFAULT_CACHE_GIB}"
        )
        raise SpecError([problem], "environment")
    return int(size * 2**30)


def log_dir(run_id: str) -> Path:
    """Where the logs of a run on this machine are kept, under `home()`."""
    return home() / "logs" / run_id
