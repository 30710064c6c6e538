"""The DAG of `holdfast.pipelines.training` as a KFP pipeline. The same file runs on a cluster and, with `holdfast run`,
on one machine.
"""

import inspect
from contextlib import nullcontext
from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.pipelines.backends.kubeflow.artifacts import show_artifacts
from holdfast.pipelines.backends.kubeflow.components import component_of
from holdfast.pipelines.backends.kubeflow.platform import pipeline_config, place
from holdfast.pipelines.training import DESCRIPTION, RETRY, SCHEDULED_START, edges_of, inputs_of, start_of
from holdfast.runtime.outcomes import EXIT_HANDLER
from holdfast.spec import Spec
from holdfast.spec.engine_text import escape_tree
from holdfast.spec.load import written_spec
from holdfast.spec.struct import to_struct
from holdfast.steps import COMMON, FIELDS, PARAMETERS, STEPS, giver_of, values_of

MODEL_STEP = "train"  # behind which the dataset and the model are shown


def task_of(name: str, given: dict[str, Any], spec: Spec, image: str | None) -> PipelineTask:
    """The task of the step `name` with its arguments, inside of a pipeline."""
    task = component_of(name)(**given, job=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
    # Caching is ours: the identity of a dataset and of a run is its content, which KFP's cache key does not see.
    task.set_caching_options(enable_caching=False)
    task.set_retry(RETRY.blind_tries, f"{RETRY.wait}s", RETRY.factor, f"{RETRY.seconds}s")
    return place(task, STEPS[name], spec, image)


def spec_default(spec: Spec) -> dict[str, Any]:
    """What the form shows of a spec: what a person wrote of it."""
    found: dict[str, Any] = escape_tree(to_struct(written_spec(spec)))
    return found


def training_pipeline(spec: Spec, image: str | None = None, scheduled: bool = False) -> BaseComponent:
    """The pipeline of `spec`, which is the default of a parameter that a person can change in the KFP UI.

    `image` replaces the default image of every step. Where the pods run is decided here, and not by that parameter.
    A `scheduled` pipeline asks first whether a retraining is due, and does nothing when it is not.
    """

    edges, compiled = edges_of(spec), escape_tree(values_of(spec))
    defaults = {one.name: one.default for one in PARAMETERS.values()} | {"spec": spec_default(spec)} | compiled

    def make(name: str, given: dict[str, Any], made: dict[str, PipelineTask]) -> PipelineTask:
        inputs = {
            one: made[giver].outputs["Output"] if (giver := giver_of(one)) else given[one]
            for one in inputs_of(name, made)
        }
        common = {one: given[one] for one in (*COMMON, *FIELDS)} | {"compiled": compiled}
        return task_of(name, {**common, **inputs}, spec, image)

    def follow(
        name: str, given: dict[str, Any], made: dict[str, PipelineTask], last: PipelineTask | None = None
    ) -> None:
        """Make the step `name`, behind `last`, and what comes after it."""
        made[name] = make(name, given, made)
        if last is not None:
            made[name].after(last)
        if name == MODEL_STEP:
            show_artifacts(made[giver_of("dataset_id")], made[name], spec, image)
        for edge in (edge for edge in edges if edge.before == name):
            if edge.each:
                items = made[name].outputs[STEPS[name].items]
                with dsl.ParallelFor(items, name=f"each-{edge.after}", parallelism=spec.data.fan_out) as item:
                    made[edge.after] = make(edge.after, {**given, STEPS[edge.after].item: item}, made)
                for later in (later for later in edges if later.before == edge.after):
                    follow(later.after, given, made, made[edge.after])
                continue
            word = made[name].outputs["Output"]
            with dsl.If(word == edge.when, name=f"if-{edge.when}") if edge.when else nullcontext():
                follow(edge.after, given, made)

    def training(*values: Any) -> None:
        given = dict(zip(PARAMETERS, values, strict=True))
        with dsl.ExitHandler(make(EXIT_HANDLER, given, {}), name="run"):
            follow(SCHEDULED_START if scheduled else start_of(spec), given, {})

    # KFP reads the parameters, their defaults and what they mean off the function.
    training.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                one.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=defaults[one.name],
                annotation=type(one.default),
            )
            for one in PARAMETERS.values()
        ]
    )
    meanings = "".join(f"    {one.name}: {one.help}\n" for one in PARAMETERS.values())
    training.__doc__ = f"{DESCRIPTION}\n\nArgs:\n{meanings}"
    return dsl.pipeline(training, name=spec.name, description=DESCRIPTION, pipeline_config=pipeline_config(spec))
