"""Artifacts of an MLflow run, read and written within a time limit.

MLflow's artifacts go through clients of other systems (S3, Google Cloud, Azure). These may wait minutes for credentials
or a server that never answer. No call here takes longer than `SECONDS`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.runtime.temporary import temporary_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

SECONDS = 20.0

T = TypeVar("T")


def write_text(client: MlflowClient, mlflow_run_id: str, text: str, path: str) -> None:
    """Write an artifact. Raises what MLflow's client raises, and TimeoutError."""
    bounded(lambda: client.log_text(mlflow_run_id, text, path), f"writing the artifact {path}")


def read_text(client: MlflowClient, mlflow_run_id: str, path: str) -> str:
    """Read an artifact. Raises what MLflow's client raises, and TimeoutError."""

    def download() -> str:
        with temporary_folder("artifact") as folder:
            return Path(client.download_artifacts(mlflow_run_id, path, folder)).read_text(encoding="utf-8")

    return bounded(download, f"reading the artifact {path}")


def bounded(call: Callable[[], T], what: str, seconds: float | None = None) -> T:
    """The result of `call`. Raises what it raises, and TimeoutError after `seconds` (default: SECONDS). The waiting
    thread is then abandoned, and ends with the process."""
    seconds = SECONDS if seconds is None else seconds
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="mlflow-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{what} did not end within {seconds:g} s")
    return results[0]
