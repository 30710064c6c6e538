"""Rules of `train`: a training script, and what it leaves without use."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from holdfast.spec.errors import Problem
from holdfast.spec.section import Section
from holdfast.spec.tree import Spec

_WITHOUT_USE = ("model", "training")  # sections of Holdfast's own loop
_PARALLEL = ("processes", "threads")  # fields that a script uses
_EVALUATION = ("command", "timeout_minutes", "load", "metrics", "versus_champion", "unscorable_champion")
_AFTER = ("registration", "serving", "schedule")  # sections of the steps after the evaluation


def check_data(spec: Spec) -> Iterator[Problem]:
    """A run without a script reads data, and sets no field of a script."""
    if not spec.data.sources:
        yield Problem("data", None, "is required", "add the section data, or a training script: train.script")
    for name, value in _changed(spec.train):
        yield Problem(f"train.{name}", value, "is not used without train.script", "add train.script, or remove it")


def check_script(spec: Spec) -> Iterator[Problem]:
    """A script stays in its folder, and no field is given that it does not use."""
    script = PurePosixPath(spec.train.script or "")
    if script.is_absolute() or ".." in script.parts:
        remedy = "write a path relative to the folder of the spec, and keep the script below it"
        yield Problem("train.script", spec.train.script, "is no path below the folder of the spec", remedy)
    if spec.data.kind != "text":
        remedy = "use kind: text, or name the files in train.inputs"
        yield Problem("data.kind", spec.data.kind, "is not read by train.script", remedy)
    elif spec.data.document_masks:  # with another kind it is the default
        message = "is not used by train.script, which masks documents itself"
        yield Problem("data.document_masks", True, message, "remove it")
    for section in _WITHOUT_USE:
        for name, value in _changed(getattr(spec, section)):
            yield Problem(f"{section}.{name}", value, "is not used by train.script", "remove it")
    if spec.telemetry.observers:
        message = "is not used by train.script, whose metrics are those of session.step"
        yield Problem("telemetry.observers", [one.use for one in spec.telemetry.observers], message, "remove it")
    for name, value in _changed(spec.parallel):
        if name not in _PARALLEL:
            remedy = "remove it: the script lays out its own model"
            yield Problem(f"parallel.{name}", value, "is not used by train.script", remedy)


def check_script_evaluation(spec: Spec) -> Iterator[Problem]:
    """A script's model is scored by a command or by metrics on a loaded model, and is registered only then."""
    evaluation = spec.evaluation
    for name, value in _changed(evaluation):
        if name not in _EVALUATION:
            remedy = "remove it: evaluation.command and evaluation.metrics score the export of a script"
            yield Problem(f"evaluation.{name}", value, "is not used by train.script", remedy)
    functions = [metric for metric in evaluation.metrics if metric.use is not None]
    if functions and evaluation.load is None:
        remedy = "add evaluation.load: a function that returns the model in the folder of an export"
        yield Problem("evaluation.metrics", functions[0].use, "needs a model", remedy)
    if evaluation.load is not None and not functions:
        remedy = "remove it, or add a metric with a function: use"
        yield Problem("evaluation.load", evaluation.load.use, "is used by no metric", remedy)
    if spec.schedule.max_decay is not None:
        message = "is not known for train.script, which has no held-out text"
        yield Problem("schedule.max_decay", spec.schedule.max_decay, message, "remove it")
    if spec.is_evaluated:
        return
    for section in ("evaluation", *_AFTER):
        for name, value in _changed(getattr(spec, section)):
            remedy = "add evaluation.command or evaluation.metrics: only a model that they bless is registered"
            yield Problem(f"{section}.{name}", value, "is not used without an evaluation", remedy)


def _changed(section: Section) -> Iterator[tuple[str, object]]:
    """The fields of a section that do not have their default values."""
    default = type(section)()
    for name in type(section).model_fields:
        value = getattr(section, name)
        if value != getattr(default, name):
            yield name, value
