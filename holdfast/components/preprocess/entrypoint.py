"""What the preprocess step does in a DAG, and what it shows."""

from __future__ import annotations

import os

from holdfast.components.preprocess import run
from holdfast.dataset import Dataset
from holdfast.runtime.environment import cache_dir
from holdfast.spec import Spec
from holdfast.spec.json_parsing import parse_json
from holdfast.steps import Artifact, StepResult
from holdfast.store import layout, open_store

WORKFLOW = "HOLDFAST_WORKFLOW"  # the Argo Workflow that this pod is of, on Kubeflow and on Argo


def body(spec: Spec, url: str, *, salt: str = "", division: str = "", trials: str = "") -> StepResult:
    """Prepare the dataset; the result is `Prepared`. `salt` is that of the training which comes next, `trials` those of
    a sweep, a JSON list of lists of overrides."""
    store = open_store(url)
    prepared = run(spec, store, division=division)
    if not trials:  # each trial may have a context of its own
        _require_samples(spec, Dataset.open(store, prepared.dataset_id, cache_dir()))
    dataset = Artifact(key=layout.dataset(prepared.dataset_id), metadata={"dataset_id": prepared.dataset_id})
    shown = ""
    if workflow := os.environ.get(WORKFLOW):  # elsewhere nobody looks, and what it takes is slow to import
        from holdfast.components.preprocess.links import links

        shown = links(
            spec, prepared.dataset_id, salt, store, workflow, parse_json(trials or "[[]]", list[list[str]], "--trials")
        )
    return StepResult(prepared.model_dump(mode="json"), {"dataset": dataset, "links": Artifact(shown)})


def _require_samples(spec: Spec, dataset: Dataset) -> None:
    """Raises DataError for what would end the training before its first step, or the evaluation after its last one: a
    source or the held-out text is shorter than one sample."""
    dataset.training(spec.model.context, spec.training.global_batch, spec.training.seed)
    dataset.validation(spec.model.context, spec.evaluation.max_tokens)
