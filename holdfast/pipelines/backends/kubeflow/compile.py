"""Compile a spec to a KFP pipeline as IR YAML, the file that Kubeflow accepts.

It has two documents: the pipeline, and its pods on Kubernetes. The same spec gives the same bytes. KFP's own writer
repeats the defaults in a comment, and a spec with several lines breaks out of that comment. So this module writes the
file, with multi-line texts as readable blocks.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from holdfast.pipelines.backends.pods import require_no_templates
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.sizes import require_fits_kfp
from holdfast.pipelines.documents import as_yaml, in_order, write_whole
from holdfast.pipelines.trials import Trials
from holdfast.spec import Spec, digest

IMPORTS = "from typing import *\n"  # the last import that KFP writes above the function of a component
# KFP's executor prints its whole indented input when it has loaded the component: 93 lines before a step's own.
QUIET = "\nimport logging\n\nlogging.getLogger().setLevel(logging.WARNING)  # instead of printing all parameters\n"
HEADER = "# Compiled by Holdfast from the spec `{name}`, for Kubeflow Pipelines.\n"


def pipeline_ir(spec: Spec, image: str | None = None, scheduled: bool = False) -> list[dict[str, Any]]:
    """The training pipeline of `spec`, or its retraining pipeline, as KFP's PipelineSpec and PlatformSpec in JSON."""
    from holdfast.pipelines.backends.kubeflow.steps import build
    from holdfast.pipelines.retraining import retraining
    from holdfast.pipelines.training import training

    return _ir(spec, build(retraining if scheduled else training, spec, image))


def sweep_ir(spec: Spec, trials: Trials, image: str | None = None) -> list[dict[str, Any]]:
    """The sweep of `spec` in the same form."""
    from holdfast.pipelines.backends.kubeflow.steps import build
    from holdfast.pipelines.sweep import sweep

    return _ir(spec, build(sweep, spec, image, trials))


def _ir(spec: Spec, pipeline: Any) -> list[dict[str, Any]]:
    """A pipeline in JSON. A Struct does not keep the order of names, so the spec is set again in order."""
    from google.protobuf import json_format

    from holdfast.pipelines.backends.kubeflow.steps import spec_default

    ir = [json_format.MessageToDict(part) for part in (pipeline.pipeline_spec, pipeline.platform_spec)]
    ir[0]["root"]["inputDefinitions"]["parameters"]["spec"]["defaultValue"] = spec_default(spec)
    quiet(ir[0])
    return ir


def quiet(ir: dict[str, Any]) -> None:
    """Keep KFP's executor from printing the input of each step."""
    for executor in ir["deploymentSpec"]["executors"].values():
        command = executor.get("container", {}).get("command")
        if command and QUIET not in command[-1]:
            command[-1] = command[-1].replace(IMPORTS, IMPORTS + QUIET, 1)


def order_ir(request: RunRequest) -> list[dict[str, Any]]:
    """The run or sweep of a request in the same form."""
    image = request.image or None
    return sweep_ir(request.spec, request.trials, image) if request.trials else pipeline_ir(request.spec, image)


def pipeline_text(spec: Spec, image: str | None = None, scheduled: bool = False) -> str:
    """The pipeline of `spec` as YAML for Kubeflow. Raises SpecError for values that Kubeflow cannot pass on."""
    require_no_templates(spec)
    ir = pipeline_ir(spec, image, scheduled)
    require_fits_kfp(ir[0])
    return _text(spec, ir)


def component_text(spec: Spec, image: str | None = None) -> str:
    """The train step as a component file for pipelines of other people, with `spec` and its fields as defaults. Raises
    SpecError for values that Kubeflow cannot pass on."""
    from holdfast.pipelines.backends.kubeflow.component_files import FOLDER
    from holdfast.pipelines.backends.kubeflow.steps import spec_default
    from holdfast.spec.engine_text import escape_tree
    from holdfast.steps import parameter_values

    require_no_templates(spec)
    ir = yaml.safe_load((FOLDER / "train" / "component.yaml").read_text(encoding="utf-8"))
    values = escape_tree(parameter_values(spec))
    for part in (ir["root"], *ir["components"].values()):
        parameters = part["inputDefinitions"]["parameters"]
        for name, value in {"spec": in_order(spec_default(spec)), "compiled": values, **values}.items():
            parameters[name] |= {"defaultValue": value, "isOptional": True}
    if image:
        for executor in ir["deploymentSpec"]["executors"].values():
            executor["container"]["image"] = image
    require_fits_kfp(ir)
    return f"# The train step of the spec `{spec.name}`, for any Kubeflow pipeline. Written by Holdfast.\n" + as_yaml(
        ir
    )


def order_text(request: RunRequest) -> str:
    """The run or sweep of a request as YAML for Kubeflow. Raises SpecError for values that Kubeflow cannot pass on."""
    require_no_templates(request.spec)
    ir = order_ir(request)
    require_fits_kfp(ir[0], request.escaped_parameters())
    return _text(request.spec, ir)


def pipeline_digest(text: str) -> str:
    """A digest of a compiled pipeline without the spec in its form, because one spec has several spellings."""
    ir, *rest = yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    del ir["root"]["inputDefinitions"]["parameters"]["spec"]
    return digest([ir, *rest])


def compile_pipeline(spec: Spec, path: Path, image: str | None = None) -> None:
    """Write the pipeline of `spec` to `path` as YAML, completely or not at all. Raises as `write_whole` does."""
    write_whole(path, _text(spec, pipeline_ir(spec, image)))


def compile_with(
    pipeline: Callable[[Any], None], spec: Spec, path: Path, image: str | None = None, trials: Trials = ()
) -> None:
    """Compile the pipeline function of `holdfast.pipelines` for Kubeflow and write it to `path`.

    Raises as `pipeline_text` and `write_whole` do.
    """
    from holdfast.pipelines.backends.kubeflow.steps import build

    require_no_templates(spec)
    ir = _ir(spec, build(pipeline, spec, image, trials))
    require_fits_kfp(ir[0])
    write_whole(path, _text(spec, ir))


def _text(spec: Spec, ir: list[dict[str, Any]]) -> str:
    pipeline = copy.deepcopy(ir[0])
    parameter = pipeline["root"]["inputDefinitions"]["parameters"]["spec"]
    parameter["defaultValue"] = in_order(parameter["defaultValue"])
    return HEADER.format(name=spec.name) + as_yaml(pipeline, *ir[1:])
