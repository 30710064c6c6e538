"""`python -m holdfast.components.train --spec SPEC --dataset-id D`: trains a run to its last step."""

import sys

from holdfast.components.train import run, run_until
from holdfast.model.hub import first_weights_digest
from holdfast.pages import draw_training
from holdfast.spec import Spec, run_id
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import main
from holdfast.store import Store, layout, open_store
from holdfast.telemetry import read_events

# Entry point of the train step in a DAG, and its artifacts.


def body(spec: Spec, url: str, *, dataset_id: str, salt: str, replan: bool) -> StepResult:
    """Train on a dataset from preprocess. The result is `TrainingResult`, or the scores at `training.pause_at`."""
    store = open_store(url)
    if spec.train.script is not None:
        return _script(spec, dataset_id, store, salt, replan)
    until = spec.training.pause_at if spec.training.pauses else None
    if spec.training.pause_at is not None:  # of this launch, and not of the run
        spec = spec.with_overrides(["training.pause_at=null"])
    if until is not None:
        return _paused(spec, store, dataset_id, until, salt, replan)
    result = run(spec, dataset_id, store, salt, replan=replan)
    lineage = {"run_id": result.run_id, "dataset_id": dataset_id, "checkpoint": result.checkpoint}
    figures = {name: getattr(result, name) for name in ("step", "tokens", "parameters", "attempts")}
    shown = {
        "model": Artifact(key=result.export, metadata=lineage),
        "metrics": Artifact(metadata={"training_loss": result.loss, **figures}),
        "curves": Artifact(draw_training(spec, result.run_id, store, read_events(store, result.run_id))),
    }
    return StepResult(result.model_dump(mode="json"), shown)


def _paused(spec: Spec, store: Store, dataset_id: str, until: int, salt: str, replan: bool) -> StepResult:
    scores = run_until(spec, dataset_id, store, salt, until=until, replan=replan)
    identity = run_id(spec, dataset_id, salt, first_weights_digest(spec))
    shown = {
        "model": Artifact(key=layout.checkpoint(identity, scores.step), metadata={"run_id": identity}),
        "metrics": Artifact(metadata={"step": scores.step, "loss": scores.loss}),
        "curves": Artifact(draw_training(spec, identity, store, read_events(store, identity))),
    }
    return StepResult({"run_id": identity, **scores.model_dump(mode="json")}, shown)


def _script(spec: Spec, dataset_id: str, store: Store, salt: str, replan: bool) -> StepResult:
    from holdfast.components.train.script import train_script

    result = train_script(spec, dataset_id, store, salt, replan=replan)
    figures = {"training_loss": result.loss, "step": result.step, "attempts": result.attempts}
    shown = {
        "metrics": Artifact(metadata={name: value for name, value in figures.items() if value is not None}),
        "curves": Artifact(draw_training(spec, result.run_id, store, read_events(store, result.run_id))),
    }
    lineage = {"run_id": result.run_id, "code": result.code, "checkpoint": result.checkpoint}
    if dataset_id:
        lineage["dataset_id"] = dataset_id
    shown["model"] = Artifact(key=result.export or layout.run(result.run_id), metadata=lineage)
    return StepResult(result.model_dump(mode="json"), shown)


if __name__ == "__main__":
    sys.exit(main("train", body))
