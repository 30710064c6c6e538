"""The table of steps: what each takes, gives, shows and needs. Every face and every renderer of the DAG reads it.

Leaves the order of the steps, their conditions and their retries to `holdfast.pipelines.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.components.runtime.outcomes import EXIT_HANDLER
from holdfast.components.spec.tree import Spec

HTML, MARKDOWN, METRICS, DATASET, MODEL = "HTML", "Markdown", "Metrics", "Dataset", "Model"  # as KFP's UI shows them
FILES = {HTML: "html", MARKDOWN: "md"}  # the artifacts that are documents, and how their files end


@dataclass(frozen=True)
class Parameter:
    """A parameter of the DAG: what a person may change for one run of it."""

    name: str
    default: Any
    help: str


PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("spec", "", "The spec, as YAML."),
        Parameter("overrides", [], 'Fields of the spec to change: a JSON list such as ["training.steps=50"].'),
        Parameter("store", "", "Root of the store. Empty takes the spec's, else HOLDFAST_STORE."),
        Parameter("salt", "", "Anything here makes another run of the same inputs."),
        Parameter("replan", False, "Go on although the plan is not that of the attempts before."),
    )
}
COMMON = ("spec", "overrides", "store")  # every step takes them, and `job`: the execution of the DAG that it works for


def never(_spec: Spec) -> bool:
    """For a step that asks others to compute."""
    return False


def always(_spec: Spec) -> bool:
    """For a step that computes in its own pod."""
    return True


@dataclass(frozen=True)
class Step:
    """A step of the DAG."""

    name: str  # of the folder under components/, of the task in every UI
    purpose: str
    inputs: tuple[str, ...] = ()  # besides the common ones: parameters of the DAG, and outputs of earlier steps
    outputs: tuple[str, ...] = ()  # fields of its result that others read; the first is what it returns on KFP
    artifacts: Mapping[str, str] = field(default_factory=dict)  # name: kind
    says: str = "{}"  # what a person is told of its first output
    computes: Callable[[Spec], bool] = never  # whether its pod needs the resources of `cluster.steps`
    accelerated: bool = False  # takes the share of an accelerator that `cluster.slice` names
    launches: bool = False  # makes the training job, with the rights for that, and lets it save when it has to leave
    shared_memory: bool = False  # its processes pass blocks of text to each other


STEPS = {
    step.name: step
    for step in (
        Step(
            "trigger",
            "Decide whether a retraining is due: due or not_due.",
            inputs=("salt",),
            outputs=("word", "reason"),
            artifacts={"decision": MARKDOWN},
            computes=lambda spec: spec.schedule.max_decay is not None,  # it scores the champion then
        ),
        Step(
            "preprocess",
            "Turn the sources of a spec into a dataset of packed tokens.",
            outputs=("dataset_id",),
            artifacts={"dataset": DATASET},
            says="dataset {}",
            computes=always,
            shared_memory=True,
        ),
        Step(
            "train",
            "Train the model that a spec describes; goes on from the newest checkpoint that verifies.",
            inputs=("salt", "replan", "dataset_id"),
            outputs=("run_id",),
            artifacts={"model": MODEL, "metrics": METRICS},
            launches=True,
        ),
        Step(
            "evaluate",
            "Score the model on the held-out split: blessed or not_blessed.",
            inputs=("run_id",),
            outputs=("word",),
            artifacts={"metrics": METRICS, "report": HTML},
            computes=always,
            accelerated=True,
        ),
        Step(
            "register",
            "Register the blessed model with its lineage.",
            inputs=("run_id",),
            outputs=("version",),
            artifacts={"registered": MODEL},
            says="version {}",
        ),
        Step(
            EXIT_HANDLER,
            "Say what happened, why, and where the logs are; also when the DAG failed.",
            inputs=("salt",),
            artifacts={"summary": MARKDOWN},
        ),
    )
}


def giver_of(name: str) -> str:
    """The step whose output an input is; empty for a parameter of the DAG."""
    return "" if name in PARAMETERS else next(step.name for step in STEPS.values() if name in step.outputs)
