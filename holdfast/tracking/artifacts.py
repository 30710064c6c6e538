"""Artifacts of an MLflow run, read and written within a time limit.

MLflow's artifacts go through clients of other systems (S3, Google Cloud, Azure). These may wait minutes for credentials
or a server that never answer. No call here takes longer than `SECONDS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.dataset.manifest import Manifest
from holdfast.runtime.secrets import redact
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.json_parsing import parse_json

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


# The lineage of a model as tags: the code's commit, the revisions of the data, texts of any length.


def git_commit() -> str | None:
    """The commit of the code: HOLDFAST_GIT_COMMIT, which the images set. Without it, that of the Git repository around
    the working directory, with `-dirty` if files were changed. None without either."""
    if commit := os.environ.get("HOLDFAST_GIT_COMMIT"):
        return commit
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def whole_tags(client: MlflowClient, mlflow_run_id: str, tags: Mapping[str, str], longest: int) -> dict[str, str]:
    """`tags`, with each value at most `longest` characters. A longer text becomes an artifact of the MLflow run. Its
    tag becomes a JSON object (also valid YAML) with the address: `{"artifact": "runs:/<id>/lineage/<tag>"}`."""
    stored = dict(tags)
    for name, value in tags.items():
        if len(value) > longest:
            file = f"lineage/{name}"
            write_text(client, mlflow_run_id, value, file)
            stored[name] = json.dumps({"artifact": f"runs:/{mlflow_run_id}/{file}"})
    return stored


@dataclass(frozen=True)
class _Artifact:
    """The tag of a text that is an artifact."""

    artifact: str


def whole_text(client: MlflowClient, tag: str) -> str:
    """The text of a tag: its own, or that of the artifact in this MLflow that it names."""
    if not tag.startswith('{"artifact":'):
        return tag
    address = parse_json(tag, _Artifact, "a tag of MLflow").artifact
    mlflow_run_id, _, path = address.removeprefix("runs:/").partition("/")
    return read_text(client, mlflow_run_id, path)


def dvc_revisions(manifest: Manifest) -> dict[str, str]:
    """URI to Git commit, for the sources that DVC tracks."""
    return {
        redact(source.uri): source.lineage.revision or "" for source in manifest.sources if source.lineage.kind == "dvc"
    }
