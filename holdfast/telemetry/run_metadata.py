"""`runs/<run-id>/run.json`: the metadata of a run, written once, before any other lasting object of it."""

from __future__ import annotations

import json
import time

from holdfast.spec import DATA_PLANE_VERSION, Spec
from holdfast.store import layout
from holdfast.store.interface import Store


def write_run_metadata(store: Store, run_id: str, spec: Spec, dataset_id: str, salt: str) -> None:
    """Write the metadata of a run, unless it exists, and mark the run as the newest one of its name."""
    record = {
        "run_id": run_id,
        "name": spec.name,
        "dataset_id": dataset_id,
        "salt": salt,
        "data_plane_version": DATA_PLANE_VERSION,
        "created": time.time(),
        "spec": spec.model_dump(mode="json"),
    }
    store.put_if_absent(layout.run(run_id, "run.json"), json.dumps(record, indent=2).encode())
    mark_name(store, spec.name, run_id)


def mark_name(store: Store, name: str, run_id: str) -> None:
    """Enter a run into the index of names, as the newest one of this name. A lookup then does not read all runs."""
    if name and run_id:
        store.put(layout.named(name, run_id), b"{}")
