"""Size limits of engines, in bytes. A spec that exceeds them is refused before anything is sent.

Linux allows no argument and no variable of 128 KiB or more (MAX_ARG_STRLEN). Argo keeps a Workflow with a copy of its
template in one object, and etcd accepts 1.5 MiB per request. KFP passes all parameters of a step in one argument.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.rules.cluster import MAX_ARGUMENT

MAX_WORKFLOW = 1_000_000  # of a submission; the rest of etcd's limit is for Argo's node status
KFP_OWN = 8_192  # of KFP's argument, in addition to the parameters: outputs and artifact addresses
SHORTER = "name many files by one pattern or folder, such as s3://bucket/text/*.jsonl.gz, or leave out long texts"
_PARAMETER = re.compile(r"\{\{workflow\.parameters\.([\w-]+)\}\}")


def require_fits_argo(objects: Sequence[Mapping[str, Any]], parameters: Mapping[str, str] = {}) -> None:
    """Raise SpecError if a pod of these objects could not start, or etcd would refuse them.

    `parameters`: of the Workflow, instead of the template's.
    """
    problems, total = [], sum(_bytes(manifest) for manifest in objects) + _bytes(dict(parameters))
    for manifest in objects:
        declared = manifest["spec"].get("arguments", {}).get("parameters", ())
        values = {parameter["name"]: parameter.get("value", "") for parameter in declared} | dict(parameters)
        for argument in dict.fromkeys(
            argument for template in manifest["spec"].get("templates", ()) for argument in _words(template)
        ):
            parameter_bytes = sum(len(values.get(name, "").encode()) for name in _PARAMETER.findall(argument))
            size = len(_PARAMETER.sub("", argument).encode()) + parameter_bytes
            if size > MAX_ARGUMENT:
                name = argument.removeprefix("--").partition("=")[0]
                message = f"takes {size:,} bytes in one argument of a pod, and Linux passes {MAX_ARGUMENT:,}"
                problems.append(Problem(name, f"{size} bytes", message, SHORTER))
    if total > MAX_WORKFLOW:
        message = f"makes objects of {total:,} bytes, and Argo can keep {MAX_WORKFLOW:,}"
        problems.append(Problem("spec", f"{total} bytes", message, SHORTER))
    if problems:
        raise SpecError(problems, "spec, for Argo")


def require_fits_kfp(ir: Mapping[str, Any], parameters: Mapping[str, Any] | None = None) -> None:
    """Raise SpecError if the launcher of a step of this pipeline could not start.

    `parameters`: of the run, instead of the pipeline's.
    """
    declared = ir["root"].get("inputDefinitions", {}).get("parameters", {})
    values = {name: parameter.get("defaultValue") for name, parameter in declared.items()} | dict(parameters or {})
    size = _bytes(values) + max((_bytes(constants) for constants in _constants(ir)), default=0) + KFP_OWN
    if size > MAX_ARGUMENT:
        longest = max(values, key=lambda name: _bytes(values[name]))
        message = (
            f"is too long for Kubeflow: with it the parameters of a step take {size:,} bytes in one argument, and "
            f"Linux passes {MAX_ARGUMENT:,}"
        )
        problem = Problem(longest, f"{_bytes(values[longest])} bytes", message, f"{SHORTER}; Argo takes longer specs")
        raise SpecError([problem], "spec, for Kubeflow")


def _constants(ir: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The constants of each task of a pipeline."""
    for component in (ir["root"], *ir.get("components", {}).values()):
        for task in component.get("dag", {}).get("tasks", {}).values():
            inputs = task.get("inputs", {}).get("parameters", {})
            yield {name: item["runtimeValue"]["constant"] for name, item in inputs.items() if "runtimeValue" in item}


def _words(template: Mapping[str, Any]) -> Iterator[str]:
    yield from template.get("container", {}).get("args", ())
    for task in template.get("dag", {}).get("tasks", ()):  # these become arguments of the template that the task runs
        for parameter in task.get("arguments", {}).get("parameters", ()):
            yield f"--{parameter['name']}={parameter.get('value', '')}"


def _bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
