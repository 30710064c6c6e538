"""Location of a registered model for MLflow: in the store, next to the weights, which are not copied.

Weights pass through no temporary folder. A registry takes the store's address of the model, and readers load it from
the store, as they would load MLflow's artifacts. One case differs: an MLflow server on another machine refuses a path
of this machine's folder store. The files are then sent from where they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.components.register.package import MARKER, describe_model
from holdfast.model.exported import require_intact
from holdfast.model.verified import ExportRecord
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import DataError, MissingError
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_json_object
from holdfast.tracking.artifacts import bounded
from holdfast.tracking.connection import registry_uri
from holdfast.tracking.registrations import content_digest

if TYPE_CHECKING:
    from mlflow import MlflowClient

SEND_SECONDS = 300.0  # for about 50 KB in a dozen files


def publish(
    client: MlflowClient, uri: str, mlflow_run_id: str, name: str, store: Store, export: str, expected: str = ""
) -> str:
    """Make the export under the key prefix `export` a model that the MLflow at `uri` can refer to, and return its
    source. `name` is its folder among the artifacts of the MLflow run if it must be sent. Every byte of the export
    is read and checked first against the digest `expected`. Raises MissingError and DataError."""
    record = require_intact(store, export, expected)
    folder = export.rstrip("/")
    if store.url.startswith("s3://") or not registry_uri(uri).startswith("http"):
        if not _is_described(store, export):
            _describe(store, export, record)
        return f"{store.url}/{folder}"
    there = bounded(lambda: client.list_artifacts(mlflow_run_id, name), "listing artifacts")
    if not any(Path(file.path).name == MARKER for file in there):
        with temporary_folder("register") as temporary:
            marker = describe_model(Path(temporary) / "model", record, f"{store.url}/{export}")[-1]
            marker = marker.rename(Path(temporary) / MARKER)
            described = str(Path(temporary) / "model")  # small: a store that does not answer shows here
            bounded(lambda: client.log_artifacts(mlflow_run_id, described, name), "sending the model", SEND_SECONDS)
            for file in record.files:
                path = store.local_path(f"{folder}/{file}")
                client.log_artifact(mlflow_run_id, str(path), "/".join([name, *file.split("/")[:-1]]))
            client.log_artifact(mlflow_run_id, str(marker), name)
    return f"{client.get_run(mlflow_run_id).info.artifact_uri}/{name}"


def _describe(store: Store, export: str, record: ExportRecord) -> None:
    """Write MLflow's files next to the weights, then their digests."""
    digests = {}
    with temporary_folder("register") as temporary:
        folder = Path(temporary) / "model"
        for path in describe_model(folder, record, f"{store.url}/{export}"):
            name, data = str(path.relative_to(folder)), path.read_bytes()
            store.put(f"{export.rstrip('/')}/{name}", data)
            digests[name] = content_digest(data)
    store.put(layout.package_record(export), json.dumps(digests, indent=1).encode())


def changed_package(store: Store, export: str) -> Iterator[tuple[str, str]]:
    """The files for MLflow that differ from what was written, each with the problem. Empty without a record of such
    files."""
    key = layout.package_record(export)
    try:
        digests = read_json_object(store, key)
    except MissingError:
        return
    except DataError:
        yield key.rpartition("/")[2], "is no record of files"
        return
    for name, wanted in digests.items():
        try:
            if content_digest(store.get(f"{export.rstrip('/')}/{name}")) != wanted:
                yield name, "is not the file that was registered; register the run again, it is written anew"
        except MissingError:
            yield name, "is missing"


def _is_described(store: Store, export: str) -> bool:
    """Whether an earlier call wrote all files, and they are unchanged. They hold code that runs when the model is
    loaded."""
    return store.stat(layout.package_record(export)) is not None and not any(changed_package(store, export))
