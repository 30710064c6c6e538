"""`python -m holdfast.components.preprocess --spec SPEC`: prepares the dataset of a spec."""

import os
import sys

from holdfast.components.preprocess import run
from holdfast.dataset import Dataset
from holdfast.runtime.environment import cache_dir
from holdfast.scoring.comparison import TrialList
from holdfast.spec import Spec
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.store import layout, open_store

# Entry point of the preprocess step in a DAG, and its artifacts.

WORKFLOW = "HOLDFAST_WORKFLOW"  # the Argo Workflow of this pod, on Kubeflow and on Argo


def body(spec: Spec, url: str, *, salt: str = "", division: str = "", trials: str = "") -> StepResult:
    """Prepare the dataset. The result is `Prepared`. `salt` is that of the following training. `trials` are those of
    a sweep, as a JSON list of lists of overrides."""
    store = open_store(url)
    prepared = run(spec, store, division=division)
    if not trials and spec.train.script is None:  # trials and scripts have their own context
        _require_samples(spec, Dataset.open(store, prepared.dataset_id, cache_dir()))
    dataset = Artifact(key=layout.dataset(prepared.dataset_id), metadata={"dataset_id": prepared.dataset_id})
    shown = ""
    if workflow := os.environ.get(WORKFLOW):  # without a workflow no UI shows it, and it is slow to import
        from holdfast.components.preprocess.links import links

        shown = links(spec, prepared.dataset_id, salt, store, workflow, TrialList.from_text(trials or "[[]]").trials)
    return StepResult(prepared.model_dump(mode="json"), {"dataset": dataset, "links": Artifact(shown)})


def _require_samples(spec: Spec, dataset: Dataset) -> None:
    """Raises DataError if a source or the held-out text is shorter than one sample, or a split has no prompt. Training
    would fail before its first step, or evaluation after the last one."""
    if dataset.kind == "prompts":
        dataset.prompts("train")
        dataset.prompts("validation")
        return
    dataset.training(spec.model.context, spec.training.global_batch, spec.training.seed)
    dataset.validation(spec.model.context, spec.evaluation.max_tokens)


if __name__ == "__main__":
    sys.exit(main("preprocess", body))
