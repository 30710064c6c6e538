"""A version of a registered model in MLflow, with its records that `register` leaves in the store."""

import json
import time

from holdfast.model.exported import read_record
from holdfast.runtime.environment import tracking_uri
from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from holdfast.tracking import Registration, connect, registration_key
from holdfast.tracking.registrations import content_digest


def register_version(
    store: Store, model: str, run_id: str, export: str, state_digest: str, dataset_id: str = "d", uri: str = ""
) -> int:
    """Create the version and its records without moving an alias. Returns its number."""
    uri = uri or tracking_uri()
    try:
        export_digest = read_record(store, export).digest
    except MissingError:
        export_digest = "gone"
    verdict = {"word": "blessed", "run_id": run_id, "state_digest": state_digest, "export_digest": export_digest}
    data = json.dumps({**verdict, "metrics": {}}).encode()
    key = f"blessed-{model}"
    store.put(layout.verdict(run_id, key), data)
    metadata_key = layout.run(run_id, "run.json")
    tags = {
        "holdfast.run_id": run_id,
        "holdfast.store": store.url,
        "holdfast.dataset_id": dataset_id,
        "holdfast.export": export,
        "holdfast.export_digest": export_digest,
        "holdfast.state_digest": state_digest,
        "holdfast.verdict": key,
        "holdfast.verdict_digest": content_digest(data),
    }
    client = connect(uri)
    if not any(registered.name == model for registered in client.search_registered_models()):
        client.create_registered_model(model)
    source = f"{store.url}/{export}".rstrip("/")
    version = int(client.create_model_version(model, source=source, tags=tags).version)
    record = Registration(
        run_id=run_id,
        model=model,
        version=version,
        alias="champion",
        verdict=key,
        verdict_digest=content_digest(data),
        dataset_id=dataset_id,
        export=export,
        export_digest=export_digest,
        state_digest=state_digest,
        run_digest=content_digest(store.get(metadata_key)) if store.stat(metadata_key) else "",
        source=source,
        tags=tags,
        created=time.time(),
        mlflow_run_id="",
        tracking=uri,
    )
    store.put(layout.registration(run_id, registration_key(model, uri)), record.model_dump_json().encode())
    return version
