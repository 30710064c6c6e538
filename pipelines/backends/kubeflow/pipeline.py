"""The DAG of `holdfast.pipelines.training` as a KFP pipeline. The same file runs on a cluster and, with `holdfast run`,
on one machine.
"""

import inspect
from contextlib import nullcontext
from typing import Any

from kfp import dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.components.runtime.outcomes import EXIT_HANDLER
from holdfast.components.spec import Spec, dump_spec
from holdfast.components.steps import COMMON, PARAMETERS, STEPS, giver_of
from holdfast.pipelines.backends.kubeflow.components import component_of
from holdfast.pipelines.backends.kubeflow.platform import pipeline_config, place
from holdfast.pipelines.training import DESCRIPTION, EDGES, RETRY, SCHEDULED_START, START


def training_pipeline(spec: Spec, image: str | None = None, scheduled: bool = False) -> BaseComponent:
    """The pipeline of `spec`, whose text is the default of a parameter that a person can change in the KFP UI.

    `image` replaces the default image of every step. Where the pods run is decided here, and not by that parameter.
    A `scheduled` pipeline asks first whether a retraining is due, and does nothing when it is not.
    """

    def make(name: str, given: dict[str, Any], made: dict[str, PipelineTask]) -> PipelineTask:
        step = STEPS[name]
        inputs = {one: made[giver].outputs["Output"] if (giver := giver_of(one)) else given[one] for one in step.inputs}
        common = {one: given[one] for one in COMMON}
        task = component_of(name)(**common, job=dsl.PIPELINE_JOB_ID_PLACEHOLDER, **inputs)
        # Caching is ours: the identity of a dataset and of a run is its content, which KFP's cache key does not see.
        task.set_caching_options(enable_caching=False)
        task.set_retry(RETRY.blind_tries, f"{RETRY.wait}s", RETRY.factor, f"{RETRY.seconds}s")
        return place(task, step, spec, image)

    def follow(name: str, given: dict[str, Any], made: dict[str, PipelineTask]) -> None:
        """Make the step `name`, and what comes after it."""
        made[name] = make(name, given, made)
        for edge in EDGES:
            if edge.before == name:
                word = made[name].outputs["Output"]
                with dsl.If(word == edge.when, name=f"if-{edge.when}") if edge.when else nullcontext():
                    follow(edge.after, given, made)

    def training(*values: Any) -> None:
        given = dict(zip(PARAMETERS, values, strict=True))
        with dsl.ExitHandler(make(EXIT_HANDLER, given, {}), name="run"):
            follow(SCHEDULED_START if scheduled else START, given, {})

    # KFP reads the parameters, their defaults and what they mean off the function.
    training.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                one.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=dump_spec(spec) if one.name == "spec" else one.default,
                annotation=type(one.default),
            )
            for one in PARAMETERS.values()
        ]
    )
    meanings = "".join(f"    {one.name}: {one.help}\n" for one in PARAMETERS.values())
    training.__doc__ = f"{DESCRIPTION}\n\nArgs:\n{meanings}"
    return dsl.pipeline(training, name=spec.name, description=DESCRIPTION, pipeline_config=pipeline_config(spec))
