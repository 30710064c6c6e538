"""Where MLflow finds a registered model: in the store, beside the weights, which nobody copies.

Promises that weights pass through nobody's temporary folder. A registry takes the store's own address of the model, and
whoever loads the model reads the store, as they would MLflow's artifacts. Only the files of this machine's folder store
have to go to an MLflow server on another one: its rules refuse a path; they are sent from where they lie.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from holdfast.components.model.exported import require_exported
from holdfast.components.register.package import MARKER, describe_model
from holdfast.components.store import Store
from holdfast.components.tracking.connection import registry_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient


def publish(client: MlflowClient, uri: str, mlflow_run_id: str, name: str, store: Store, export: str) -> str:
    """Make the export under the key prefix `export` a model that the MLflow at `uri` can name, and return its source.
    `name` is its folder among the artifacts of the MLflow run if it has to be sent. Raises MissingError."""
    require_exported(store, export)
    root, _, weights = export.rstrip("/").rpartition("/")
    if store.url.startswith("s3://") or not registry_uri(uri).startswith("http"):
        if store.stat(f"{root}/{MARKER}") is None:
            with TemporaryDirectory(prefix="holdfast-register-") as temporary:
                folder = Path(temporary) / "model"
                for path in describe_model(folder, weights, f"{store.url}/{export}"):
                    store.put(f"{root}/{path.relative_to(folder)}", path.read_bytes())
        return f"{store.url}/{root}"
    if not any(Path(file.path).name == MARKER for file in client.list_artifacts(mlflow_run_id, name)):
        with TemporaryDirectory(prefix="holdfast-register-") as temporary:
            marker = describe_model(Path(temporary) / "model", weights, f"{store.url}/{export}")[-1]
            marker = marker.rename(Path(temporary) / MARKER)
            client.log_artifacts(mlflow_run_id, str(Path(temporary) / "model"), name)
            for info in store.list(export):
                client.log_artifact(mlflow_run_id, str(store.local_path(info.key)), f"{name}/{weights}")
            client.log_artifact(mlflow_run_id, str(marker), name)
    return f"{client.get_run(mlflow_run_id).info.artifact_uri}/{name}"
