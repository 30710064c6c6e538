r"""Text transformations of pipeline engines, written after their sources.

- Argo (argoproj/argo-workflows, util/template): `{{tag}}` of fasttemplate over the JSON of an object. Values are quoted
  as Go's strconv.Quote does it; an unknown tag stays.
- KFP (kubeflow/pipelines): backend/src/common/util/parameter_formatter.go on text parameters, everything as parameters
  of an Argo Workflow, backend/src/v2/driver/resolve.go on constants, getPlaceholders of
  backend/src/v2/component/launcher_v2.go on the arguments of a component.
- Ray (ray/_private/utils.py, update_envs), and the kubelet (`tests.cluster.container.expanded`).
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Any

WORKFLOW = {
    "workflow.name": "run-abcde",
    "workflow.uid": "0b7e",
    "workflow.namespace": "team",
    "workflow.parameters.salt": "of-the-workflow",
    "pod.name": "run-abcde-main-1",
}


class EngineFailureError(Exception):
    """The engine rejects the object."""


def through_argo(node: Any, values: Mapping[str, str]) -> Any:
    """A JSON value after all three passes of Argo: workflow, template and pod."""
    text = json.dumps(node, ensure_ascii=False, separators=(",", ":"))
    for _ in range(3):
        text = _replaced(text, {**WORKFLOW, **values})
        try:
            json.loads(text)
        except ValueError:
            raise EngineFailureError("cannot finish template replacement because the result was invalid JSON") from None
    return json.loads(text)


def _replaced(text: str, values: Mapping[str, str]) -> str:
    pieces, place = [], 0
    while (begin := text.find("{{", place)) >= 0:
        end = text.find("}}", begin + 2)
        if end < 0:
            raise EngineFailureError('Cannot find end tag="}}"')
        pieces.append(text[place:begin])
        tag, place = text[begin + 2 : end], end + 2
        inner = tag.rpartition("{{")
        if tag.startswith("="):
            pieces.append("EXPRESSION")
        elif tag.strip() in values:
            pieces.append(_go_quoted(values[tag.strip()]))
        elif inner[1] and inner[2] in values:
            pieces.append("{{" + inner[0] + _go_quoted(values[inner[2]]))
        else:
            pieces.append("{{" + tag + "}}")
    return "".join([*pieces, text[place:]])


def _go_quoted(text: str) -> str:
    escapes = {"\a": r"\a", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\v": r"\v"}
    escapes |= {'"': r"\"", "\\": r"\\"}

    def one(character: str) -> str:
        number = ord(character)
        if character in escapes:
            return escapes[character]
        if character.isprintable():
            return character
        return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"

    return "".join(map(one, text))


def through_kfp_server(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scheduled run as the API server, Argo and the driver pass them to the launcher."""
    formatted = {name: _formatted(value) if isinstance(value, str) else value for name, value in parameters.items()}
    task = json.dumps({"inputs": formatted}, ensure_ascii=False, separators=(",", ":"))
    (passed,) = through_argo(["{{inputs.parameters.task}}"], {"inputs.parameters.task": task})
    inputs: dict[str, Any] = json.loads(passed)["inputs"]
    for name, value in inputs.items():
        if isinstance(value, str) and "{{$.workspace_path}}" in value:
            inputs[name] = value.replace("{{$.workspace_path}}", "/kfp-workspace")
        if value in ("{{$.pipeline_job_name}}", "{{$.pipeline_job_uuid}}", "{{$.pipeline_task_name}}"):
            inputs[name] = "of-the-driver"
        if isinstance(value, str) and "/kfp-workspace" in value:
            raise EngineFailureError("mounts the volume of a workspace that is not there")
    return inputs


def _formatted(text: str) -> str:
    macros = {"[[RunUUID]]": "uuid", "[[ScheduledTime]]": "2026", "[[CurrentTime]]": "2026", "[[Index]]": "1"}
    prefixes = ("[[ScheduledTime.", "[[CurrentTime.", "{{$.scheduledTime.strftime('", "{{$.currentTime.strftime('")

    def one(found: re.Match[str]) -> str:
        known = next((value for macro, value in macros.items() if found[0].startswith(macro)), None)
        return known if known is not None else "2026" if found[0].startswith(prefixes) else found[0]

    return re.sub(r"\[\[(.*?)\]\]|\{\{\$\.(.*?)\}\}", one, text)


def through_kfp_launcher(inputs: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The inputs of a component whose command has `{{$}}`; placeholders are replaced in the order `names`."""
    argument = "{{$}}".replace("{{$}}", json.dumps({"inputs": {"parameterValues": dict(inputs)}}, ensure_ascii=False))
    for name in names:
        value = inputs[name]
        text = value if isinstance(value, str) else json.dumps(value)
        argument = argument.replace(f"{{{{$.inputs.parameters['{name}']}}}}", text)
    parameters: dict[str, Any] = json.loads(argument)["inputs"]["parameterValues"]
    return parameters


def through_ray(value: str, variables: Mapping[str, str]) -> str:
    """A variable of a job as its processes see it."""
    former = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(variables)
        return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    finally:
        os.environ.clear()
        os.environ.update(former)
