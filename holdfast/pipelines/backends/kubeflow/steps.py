"""Building blocks of the pipelines in `holdfast.pipelines`: tasks of the component files, placed by a spec.

The same file runs on a cluster and, with `holdfast run`, on one machine.
"""

import argparse
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kfp import components, dsl
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.pipelines.backends.kubeflow import platform
from holdfast.pipelines.backends.kubeflow.component_files import FOLDER
from holdfast.pipelines.backends.kubeflow.platform import pipeline_config, place
from holdfast.pipelines.paths import load_spec
from holdfast.pipelines.table import RETRY
from holdfast.pipelines.trials import PARAMETERS as SWEEP_PARAMETERS
from holdfast.pipelines.trials import Trials, text_of
from holdfast.spec import Spec
from holdfast.spec.engine_text import escape, escape_tree, to_struct
from holdfast.spec.load import parse_spec, written_spec
from holdfast.steps import COMMON, FIELDS, PARAMETERS, STEPS, Parameter, parameter_values

DEFAULT_SPEC = "{name: training, data: {sources: [{uri: 'python:stdlib'}]}}"


class Pipeline:
    """A pipeline under construction. A call with the name of a step and its inputs returns the task of that step.

    `given` holds the parameters of the pipeline, and every task gets those that it takes. Arguments are only outputs of
    earlier steps (a task stands for its first output) and values for one task.
    """

    def __init__(self, spec: Spec, image: str | None, given: dict[str, Any], trials: Trials = ()) -> None:
        self._spec, self._image = spec, image
        self._values = {"overrides": [], **escape_tree(parameter_values(spec)), **given}
        self._values["compiled"] = escape_tree(parameter_values(spec))
        self.fan_out, self.has_data, self.is_evaluated = spec.data.fan_out, bool(spec.data.sources), spec.is_evaluated
        self.trials = escape(text_of(trials))  # input of the compare step
        self.overrides = [escape_tree(trial) for trial in trials]  # for each trial

    def __call__(self, name: str, **inputs: Any) -> PipelineTask:
        """The task of the step `name`, with the pod, the retries and the parameters of the pipeline."""
        names = (*COMMON, *FIELDS, "compiled", *STEPS[name].inputs)
        arguments = {parameter: self._values[parameter] for parameter in names if parameter in self._values}
        arguments |= {
            key: value.outputs["Output"] if isinstance(value, PipelineTask) else value for key, value in inputs.items()
        }
        task = component_of(name)(**arguments, job=dsl.PIPELINE_JOB_ID_PLACEHOLDER)
        # Holdfast caches by itself: datasets and runs are identified by their content, which KFP's cache key does not
        # cover.
        task.set_caching_options(enable_caching=False)
        task.set_retry(RETRY.blind_tries, f"{RETRY.wait}s", RETRY.factor, f"{RETRY.seconds}s")
        return place(task, STEPS[name], self._spec, self._image)

    def show_artifacts(self, preprocess: PipelineTask, train: PipelineTask) -> None:
        """Show the dataset and the model with their own addresses in the UI."""
        platform.show_artifacts(preprocess, train, self._spec, self._image)


@cache
def component_of(name: str) -> BaseComponent:
    """The component of the step `name`, from its file."""
    return components.load_component_from_file(str(FOLDER / name / "component.yaml"))


def spec_default(spec: Spec) -> dict[str, Any]:
    """The spec as its author wrote it, for the form."""
    struct: dict[str, Any] = escape_tree(to_struct(written_spec(spec)))
    return struct


def build(
    pipeline: Callable[[Pipeline], None], spec: Spec, image: str | None = None, trials: Trials = ()
) -> BaseComponent:
    """The KFP pipeline that the function `pipeline` describes, for `spec`.

    The spec is the default of a parameter that a person can change in the KFP UI. The placement of pods is fixed here
    and ignores that parameter. `image` replaces the default image of every step.
    """
    parameters = [PARAMETERS[name] for name in SWEEP_PARAMETERS] if trials else list(PARAMETERS.values())
    defaults = {"spec": spec_default(spec)} | escape_tree(parameter_values(spec))
    description = inspect.getdoc(pipeline) or ""

    def body(*values: Any) -> None:
        arguments = {parameter.name: value for parameter, value in zip(parameters, values, strict=True)}
        pipeline(Pipeline(spec, image, arguments, trials))

    # KFP reads the parameters, their defaults and their descriptions from the function.
    body.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(parameter, defaults.get(parameter.name, parameter.default)) for parameter in parameters]
    )
    meanings = "".join(f"    {parameter.name}: {parameter.help}\n" for parameter in parameters)
    body.__doc__ = f"{description}\n\nArgs:\n{meanings}"
    name = f"{spec.name}-sweep" if trials else spec.name
    return dsl.pipeline(body, name=name, description=description, pipeline_config=pipeline_config(spec))


def _parameter(one: Parameter, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=type(one.default)
    )


def main(pipeline: Callable[[Pipeline], None], argv: Sequence[str] | None = None) -> None:
    """The command line of a pipeline's module: compile it to a file."""
    from holdfast.pipelines.backends.kubeflow.compile import compile_with
    from holdfast.pipelines.trials import grid

    parser = argparse.ArgumentParser(description=inspect.getdoc(pipeline))
    parser.add_argument("spec", nargs="?", type=Path, help="the spec that the form shows (default: a small example)")
    parser.add_argument("-o", "--output", type=Path, default=Path("pipeline.yaml"), help="(default: %(default)s)")
    parser.add_argument("--image", help="the image of every step (default: that of this version)")
    parser.add_argument("--over", action="append", default=[], metavar="FIELD=VALUE,VALUE", help="trials of a sweep")
    arguments = parser.parse_args(argv)
    spec = load_spec(arguments.spec) if arguments.spec else parse_spec(DEFAULT_SPEC)
    compile_with(
        pipeline, spec, arguments.output, arguments.image, grid(spec, arguments.over) if arguments.over else ()
    )
