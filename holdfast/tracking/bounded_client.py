"""An MLflow client whose calls always end, even when the server only sends a byte now and then.

MLflow's timeout bounds the silence between two bytes, and its sessions have no public hook for a deadline. So each call
of the client runs in a thread, and the caller waits no longer than the total time of all its tries.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.tracking.artifacts import bounded

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
            found = super().__getattribute__(name)
            if name.startswith("_") or not callable(found) or getattr(_inside, "call", False):
                return found
            return functools.partial(_call, found)

    return BoundedClient


def _call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        _inside.call = True  # nested calls of the method need no further thread
        return method(*args, **kwargs)

    return bounded(run, f"MLflow's {method.__name__}", total_seconds())
