"""What the preprocess step does in a DAG, and what it shows."""

from __future__ import annotations

from holdfast.components.preprocess import run
from holdfast.components.spec import Spec
from holdfast.components.steps import Artifact, Done
from holdfast.components.store import layout, open_store


def body(spec: Spec, url: str) -> Done:
    """Prepare the dataset; the result is `Prepared`."""
    prepared = run(spec, open_store(url))
    dataset = Artifact(key=layout.dataset(prepared.dataset_id), metadata={"dataset_id": prepared.dataset_id})
    return Done(prepared.model_dump(mode="json"), {"dataset": dataset})
