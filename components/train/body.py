"""What the train step does in a DAG, and what it shows."""

from __future__ import annotations

from holdfast.components.spec import Spec
from holdfast.components.steps import Artifact, Done
from holdfast.components.store import open_store
from holdfast.components.train import run


def body(spec: Spec, url: str, *, dataset_id: str, salt: str, replan: bool) -> Done:
    """Train on a dataset that preprocess made; the result is `TrainingResult`."""
    result = run(spec, dataset_id, open_store(url), salt, replan=replan)
    lineage = {"run_id": result.run_id, "dataset_id": dataset_id, "checkpoint": result.checkpoint}
    figures = Artifact(metadata={"step": result.step, "training_loss": result.loss})
    model = Artifact(key=result.export, metadata=lineage)
    return Done(result.model_dump(mode="json"), {"model": model, "metrics": figures})
