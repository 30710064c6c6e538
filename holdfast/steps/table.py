"""Table of steps: inputs, outputs, artifacts and needs of each. Every adapter and every renderer of the DAG reads it.

The order of the steps, their conditions and their retries are in `holdfast.pipelines.table`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.spec.errors import ExitCode
from holdfast.spec.tree import Spec
from holdfast.steps.outcomes import EXIT_HANDLER

# Result of a step for any caller: its values, and artifacts for the UIs.


@dataclass(frozen=True)
class Artifact:
    """An artifact for a UI: a document, or a pointer to data in the store under `key`."""

    text: str = ""
    key: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # includes figures; NaN is left out


@dataclass(frozen=True)
class StepResult:
    """The result of a step: `result` as JSON values, and artifacts by their names in the table. `summary` is for the
    exit handler, and defaults to the first output."""

    result: Mapping[str, Any]
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    summary: str = ""


HTML, MARKDOWN, METRICS, DATASET, MODEL = "HTML", "Markdown", "Metrics", "Dataset", "Model"  # names in KFP's UI
FILES = {HTML: "html", MARKDOWN: "md"}  # artifacts that are documents, and their file extensions
PLACE = ("scheme", "uri")  # outputs on KFP with the location of an artifact: its scheme, and its full URI
ARTIFACTS = "artifacts"  # a KFP task that is no step: it registers the data there


@dataclass(frozen=True)
class Parameter:
    """A parameter of the DAG that a person may change for one run of it."""

    name: str
    default: Any  # for a field of the spec only its type counts: the spec has the value
    help: str
    field: str = ""  # of the spec that it changes


PARAMETERS = {
    parameter.name: parameter
    for parameter in (
        Parameter("spec", {}, "The spec, as JSON. Fields with default values can be left out."),
        Parameter("overrides", [], 'Fields of the spec to change: a JSON list such as ["training.steps=50"].'),
        Parameter("store", "", "Root of the store. If empty: the store of the spec, or else HOLDFAST_STORE."),
        Parameter("salt", "", "Any text here starts a different run with the same inputs."),
        Parameter("replan", False, "Continue although the plan differs from that of earlier attempts."),
        Parameter("steps", 0, "Optimizer steps.", field="training.steps"),
        Parameter("learning_rate", 0.0, "Peak learning rate.", field="training.optimizer.learning_rate"),
        Parameter("layers", 0, "Decoder layers.", field="model.layers"),
        Parameter("hidden", 0, "Width of the residual stream.", field="model.hidden"),
        Parameter("heads", 0, "Attention heads.", field="model.heads"),
        Parameter("data", [], 'Sources of text, such as [{"uri": "s3://bucket/text"}].', field="data.sources"),
    )
}
FIELDS = {parameter.name: parameter.field for parameter in PARAMETERS.values() if parameter.field}
COMMON = ("spec", "overrides", "store")  # inputs of every step, in addition to `job`, the current execution of the DAG
# A trial of a sweep that ends with one of these ends all trials. A person stopped the whole sweep, or no other step
# could reach the store either.
ENDS_ALL_TRIALS = (ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.PREEMPTED, ExitCode.STORE_UNREACHABLE)
TRIAL = "trial"  # the number of the trial of a step's execution; empty without trials


def never(_spec: Spec) -> bool:
    """For a step that loads no model."""
    return False


def always(_spec: Spec) -> bool:
    """For a step that scores a model."""
    return True


@dataclass(frozen=True)
class Step:
    """A step of the DAG."""

    name: str  # of the folder under components/ and of the task in every UI
    purpose: str
    inputs: tuple[str, ...] = ()  # in addition to the common ones: parameters of the DAG, and outputs of earlier steps
    outputs: tuple[str, ...] = ()  # fields of its result for other steps; the first is its return value on KFP
    artifacts: Mapping[str, str] = field(default_factory=dict)  # name: kind
    items: str = ""  # the output that is a list; the next step runs once per item
    item: str = ""  # the input that is one item of the previous step's list
    others: Mapping[str, str] = field(default_factory=dict)  # further outputs that KFP passes on: name, kind
    shown: str = ""  # the artifact whose location KFP also passes on: see `PLACE`
    optional: tuple[str, ...] = ()  # inputs that are empty if the DAG does not provide them
    message: str = "{}"  # for a person, about its first output
    scores: Callable[[Spec], bool] = never  # whether it scores a model; its pod then follows `cluster.steps.evaluate`
    launches: bool = False  # creates the training job, with the rights for that, and lets it save when stopped
    serves: bool = False  # writes the InferenceService of the spec, with the right for that
    pod: str = ""  # the step whose pod settings it uses; default: its own
    shared_memory: bool = False  # its processes pass blocks of text to each other
    per_trial: bool = False  # in a sweep it runs once per trial, with the number in `trial`
    reads_job_outcomes: bool = False  # of this or another execution; its body gets `job`


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
            "Divide the sources of a spec among workers, and create the tokenizer.",
            outputs=("division", "shares"),
            items="shares",
            message="division {}",
        ),
        Step(
            "tokenise",
            "Tokenize one share of the sources of a spec.",
            inputs=("division", "share"),
            item="share",
            shared_memory=True,
        ),
        Step(
            "preprocess",
            "Convert the sources of a spec to a dataset of packed tokens, and list links for monitoring the training.",
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
            "Train the model of a spec. Resumes from the newest checkpoint that verifies.",
            inputs=("salt", "replan", "dataset_id"),
            optional=("dataset_id",),  # a training script has no dataset
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
            "Compare the trials of a sweep, and select the best: blessed or not_blessed.",
            inputs=("salt", "dataset_id", "trials"),
            optional=("dataset_id",),  # a script may have no data
            outputs=("word", "winner", "changes"),
            artifacts={"comparison": MARKDOWN},
            others={"winner": "str", "changes": "list"},
            pod=EXIT_HANDLER,
            reads_job_outcomes=True,
        ),
        Step(
            EXIT_HANDLER,
            "Report what happened, why, and where the logs are. Also runs if the DAG failed.",
            inputs=("salt", "trials"),
            optional=("trials",),  # of a sweep
            artifacts={"summary": MARKDOWN},
            reads_job_outcomes=True,
        ),
    )
}


def producer_of(name: str) -> str:
    """The step whose output an input is. Empty for a parameter of the DAG and for an item of a list."""
    return next((step.name for step in STEPS.values() if name in step.outputs), "")
