"""What the preprocess step does in a DAG, and what it shows."""

from __future__ import annotations

import os

from holdfast.components.preprocess import run
from holdfast.components.spec import Spec
from holdfast.components.spec.json_parsing import parse_json
from holdfast.components.steps import Artifact, Done
from holdfast.components.store import layout, open_store

WORKFLOW = "HOLDFAST_WORKFLOW"  # the Argo Workflow that this pod is of, on Kubeflow and on Argo


def body(spec: Spec, url: str, *, salt: str = "", division: str = "", trials: str = "") -> Done:
    """Prepare the dataset; the result is `Prepared`. `salt` is that of the training which comes next, `trials` those of
    a sweep, a JSON list of lists of overrides."""
    store = open_store(url)
    prepared = run(spec, store, division=division)
    dataset = Artifact(key=layout.dataset(prepared.dataset_id), metadata={"dataset_id": prepared.dataset_id})
    shown = ""
    if workflow := os.environ.get(WORKFLOW):  # elsewhere nobody looks, and what it takes is slow to import
        from holdfast.components.preprocess.links import links

        shown = links(
            spec, prepared.dataset_id, salt, store, workflow, parse_json(trials or "[[]]", list[list[str]], "--trials")
        )
    return Done(prepared.model_dump(mode="json"), {"dataset": dataset, "links": Artifact(shown)})
