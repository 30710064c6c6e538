"""The table of steps: what each takes, gives, shows and needs. Every adapter and every renderer of the DAG reads it.

Leaves the order of the steps, their conditions and their retries to `holdfast.pipelines.table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.runtime.outcomes import EXIT_HANDLER
from holdfast.spec.errors import ExitCode
from holdfast.spec.tree import Spec

HTML, MARKDOWN, METRICS, DATASET, MODEL = "HTML", "Markdown", "Metrics", "Dataset", "Model"  # as KFP's UI shows them
FILES = {HTML: "html", MARKDOWN: "md"}  # the artifacts that are documents, and how their files end
PLACE = ("scheme", "uri")  # outputs on KFP that say where an artifact lies, in one word and whole
ARTIFACTS = "artifacts"  # a task on KFP that is no step: it enters what lies there


@dataclass(frozen=True)
class Parameter:
    """A parameter of the DAG: what a person may change for one run of it."""

    name: str
    default: Any  # of a field of the spec only its kind counts: the spec has the value
    help: str
    field: str = ""  # of the spec, which it changes


PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("spec", {}, "The spec: the fields that are not the defaults, as JSON."),
        Parameter("overrides", [], 'Fields of the spec to change: a JSON list such as ["training.steps=50"].'),
        Parameter("store", "", "Root of the store. Empty takes the spec's, else HOLDFAST_STORE."),
        Parameter("salt", "", "Anything here makes another run of the same inputs."),
        Parameter("replan", False, "Go on although the plan is not that of the attempts before."),
        Parameter("steps", 0, "Optimizer steps.", field="training.steps"),
        Parameter("learning_rate", 0.0, "Peak learning rate.", field="training.optimizer.learning_rate"),
        Parameter("layers", 0, "Decoder layers.", field="model.layers"),
        Parameter("hidden", 0, "Width of the residual stream.", field="model.hidden"),
        Parameter("heads", 0, "Attention heads.", field="model.heads"),
        Parameter("data", [], 'Sources of text, such as [{"uri": "s3://bucket/text"}].', field="data.sources"),
    )
}
FIELDS = {parameter.name: parameter.field for parameter in PARAMETERS.values() if parameter.field}
COMMON = ("spec", "overrides", "store")  # every step takes them, and `job`: the execution of the DAG that it works for
# A trial of a sweep that ends with one of these does not fail alone: a person ends the whole sweep, or no other step
# would find the store either.
ENDS_ALL_TRIALS = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED, ExitCode.STORE_UNREACHABLE)
TRIAL = "trial"  # the number of the trial that an execution of a step is for; empty where there are none


def never(_spec: Spec) -> bool:
    """For a step that looks at no model."""
    return False


def always(_spec: Spec) -> bool:
    """For a step that is there to score one."""
    return True


@dataclass(frozen=True)
class Step:
    """A step of the DAG."""

    name: str  # of the folder under components/, of the task in every UI
    purpose: str
    inputs: tuple[str, ...] = ()  # besides the common ones: parameters of the DAG, and outputs of earlier steps
    outputs: tuple[str, ...] = ()  # fields of its result that others read; the first is what it returns on KFP
    artifacts: Mapping[str, str] = field(default_factory=dict)  # name: kind
    items: str = ""  # the output that is a list: the step after it runs once for each of its items
    item: str = ""  # the input that is one item of the list of the step before
    others: Mapping[str, str] = field(default_factory=dict)  # further outputs that KFP passes on: name, kind
    shown: str = ""  # the artifact of which KFP passes on, too, where it lies: see `PLACE`
    optional: tuple[str, ...] = ()  # inputs that are empty where the DAG has nothing that gives them
    message: str = "{}"  # what a person is told of its first output
    scores: Callable[[Spec], bool] = never  # whether it scores a model, in a pod as `cluster.steps.evaluate` has it
    launches: bool = False  # makes the training job, with the rights for that, and lets it save when it has to leave
    serves: bool = False  # writes the InferenceService where the spec has one, with the right for that
    pod: str = ""  # the step whose pod in the spec this one has too; default: its own
    shared_memory: bool = False  # its processes pass blocks of text to each other
    per_trial: bool = False  # in a sweep it runs once for each trial, and `trial` says for which
    reads_job_outcomes: bool = False  # at what steps of this or another execution left: its body gets `job`


STEPS = {
    step.name: step
    for step in (
        Step(
            "trigger",
            "Decide whether a retraining is due: due or not_due.",
            inputs=("salt",),
            outputs=("word", "reason"),
            artifacts={"decision": MARKDOWN},
            reads_job_outcomes=True,
            scores=lambda spec: spec.schedule.max_decay is not None,
        ),
        Step(
            "divide",
            "Divide the sources of a spec among workers, and make the tokenizer.",
            outputs=("division", "shares"),
            items="shares",
            message="division {}",
        ),
        Step(
            "tokenise",
            "Tokenise one share of the sources of a spec.",
            inputs=("division", "share"),
            item="share",
            shared_memory=True,
        ),
        Step(
            "preprocess",
            "Turn the sources of a spec into a dataset of packed tokens, and say where its training can be watched.",
            inputs=("division", "salt", "trials"),
            optional=("division", "trials"),
            outputs=("dataset_id",),
            artifacts={"dataset": DATASET, "links": MARKDOWN},
            shown="dataset",
            message="dataset {}",
            shared_memory=True,
        ),
        Step(
            "train",
            "Train the model that a spec describes; goes on from the newest checkpoint that verifies.",
            inputs=("salt", "replan", "dataset_id"),
            outputs=("run_id",),
            artifacts={"model": MODEL, "metrics": METRICS, "curves": HTML},
            shown="model",
            launches=True,
            per_trial=True,
        ),
        Step(
            "evaluate",
            "Score the model on the held-out split: blessed or not_blessed.",
            inputs=("run_id",),
            outputs=("word",),
            artifacts={"metrics": METRICS, "report": HTML},
            scores=always,
            per_trial=True,
        ),
        Step(
            "register",
            "Register the blessed model with its lineage.",
            inputs=("run_id",),
            outputs=("version",),
            artifacts={"registered": MODEL},
            serves=True,
            message="version {}",
        ),
        Step(
            "compare",
            "Compare the trials of a sweep, and name the best: blessed or not_blessed.",
            inputs=("salt", "dataset_id", "trials"),
            outputs=("word", "winner", "changes"),
            artifacts={"comparison": MARKDOWN},
            others={"winner": "str", "changes": "list"},
            pod=EXIT_HANDLER,
            reads_job_outcomes=True,
        ),
        Step(
            EXIT_HANDLER,
            "Say what happened, why, and where the logs are; also when the DAG failed.",
            inputs=("salt", "trials"),
            optional=("trials",),  # of a sweep
            artifacts={"summary": MARKDOWN},
            reads_job_outcomes=True,
        ),
    )
}


def producer_of(name: str) -> str:
    """The step whose output an input is; empty for a parameter of the DAG, and for an item of a list."""
    return next((step.name for step in STEPS.values() if name in step.outputs), "")
