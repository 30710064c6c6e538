"""Consistency check of Argo objects: every reference resolves, and every required argument is given.

Reports one sentence for each missing template, task, parameter, artifact, volume or variable. Argo's schema checks the
form of the objects.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]

_REFERENCE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_OUTPUT = re.compile(r"tasks\.([\w-]+)\.outputs\.(parameters|artifacts)\.([\w-]+)")
_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|[A-Za-z_][\w.]*")
_EVERYWHERE = {"workflow.name", "workflow.uid", "workflow.namespace", "workflow.serviceAccountName"}
_AT_THE_END = {"workflow.status", "workflow.failures", "workflow.duration"}
_IN_RETRIES = {f"lastRetry.{field}" for field in ("exitCode", "status", "duration", "message")} | {"asInt", "asFloat"}


def check(objects: Sequence[Object]) -> list[str]:
    """The problems of WorkflowTemplates, Workflows and CronWorkflows that are applied together; empty if none."""
    templates = {
        manifest["metadata"]["name"]: manifest["spec"] for manifest in objects if manifest["kind"] == "WorkflowTemplate"
    }
    problems = []
    for manifest in objects:
        spec = manifest["spec"].get("workflowSpec", manifest["spec"])
        metadata = manifest["metadata"]
        name = f"{manifest['kind']} {metadata.get('name') or metadata['generateName']}"
        problems += [f"{name}: {problem}" for problem in _workflow(spec, templates)]
    return problems


def _workflow(spec: Object, known: Mapping[str, Object]) -> Iterator[str]:
    resolved = dict(spec)
    if reference := spec.get("workflowTemplateRef"):
        if reference["name"] not in known:
            yield f"its workflowTemplateRef names {reference['name']!r}, which is not among the objects"
            return
        resolved = {**known[reference["name"]], **spec}
    templates = {template["name"]: template for template in resolved.get("templates", ())}
    if len(templates) != len(resolved.get("templates", ())):
        yield "two templates have one name"
    for field in ("entrypoint", "onExit"):
        if field in resolved and resolved[field] not in templates:
            yield f"{field} names the template {resolved[field]!r}, which is not there"
    if "entrypoint" not in resolved:
        yield "it has no entrypoint"
    if reference:
        return  # the template contains the rest, and is checked itself
    parameters = {parameter["name"] for parameter in resolved.get("arguments", {}).get("parameters", ())}
    everywhere = _EVERYWHERE | {f"workflow.parameters.{name}" for name in parameters}
    for template in templates.values():
        scope = everywhere | _inputs(template) | (_AT_THE_END if template["name"] == resolved.get("onExit") else set())
        for problem in [
            *_dag(template, templates, scope),
            *_references(template, scope | ({"pod.name", "retries"} if "dag" not in template else set())),
            *_retries(template),
            *_mounts(template, resolved),
            *_outputs(template),
        ]:
            yield f"template {template['name']}: {problem}"
    used = {resolved.get("onExit"), resolved.get("entrypoint")} | {
        task.get("template") for template in templates.values() for task in template.get("dag", {}).get("tasks", ())
    }
    entry_points = {name for name, template in templates.items() if "dag" in template}
    for name in templates.keys() - used - entry_points:
        yield f"template {name}: nothing uses it"


def _inputs(template: Object) -> set[str]:
    return {
        f"inputs.{kind}.{item['name']}"
        for kind in ("parameters", "artifacts")
        for item in template.get("inputs", {}).get(kind, ())
    }


def _dag(template: Object, templates: Mapping[str, Object], scope: set[str]) -> Iterator[str]:
    tasks = {task["name"]: task for task in template.get("dag", {}).get("tasks", ())}
    dependencies: dict[str, set[str]] = {name: _dependencies(task) for name, task in tasks.items()}
    for name, task in tasks.items():
        target = templates.get(task.get("template", ""))
        if target is None:
            yield f"task {name} runs the template {task.get('template')!r}, which is not there"
            continue
        for missing in sorted(dependencies[name] - tasks.keys()):
            yield f"task {name} depends on {missing!r}, which is no task"
        ancestors = _ancestors(name, dependencies)
        if name in ancestors:
            yield f"task {name} depends on itself"
        yield from (f"task {name}: {problem}" for problem in _arguments(task, target))
        outputs = {
            output
            for ancestor in ancestors & tasks.keys()
            for output in _promised(ancestor, tasks[ancestor], templates)
        }
        items = {"item"} if "withParam" in task else set()
        for reference in _found(task):
            if reference in scope | outputs | items:
                continue
            if (match := _OUTPUT.fullmatch(reference)) and match[1] in tasks and match[1] not in ancestors:
                yield f"task {name} refers to {reference}, but does not depend on {match[1]}"
            else:
                yield f"task {name} refers to {reference}, which is not there"


def _dependencies(task: Object) -> set[str]:
    references = re.findall(r"[A-Za-z0-9][\w-]*(?:\.\w+)?", task.get("depends", ""))
    return {*task.get("dependencies", ()), *(name.partition(".")[0] for name in references)}


def _ancestors(name: str, before: Mapping[str, set[str]]) -> set[str]:
    ancestors: set[str] = set()
    waiting = list(before[name])
    while waiting:
        if (ancestor := waiting.pop()) not in ancestors:
            ancestors.add(ancestor)
            waiting += before.get(ancestor, ())
    return ancestors


def _promised(name: str, task: Object, templates: Mapping[str, Object]) -> set[str]:
    """The valid references to a task's outputs."""
    outputs = templates.get(task.get("template", ""), {}).get("outputs", {})
    return {f"tasks.{name}.status"} | {
        f"tasks.{name}.outputs.{kind}.{output['name']}"
        for kind in ("parameters", "artifacts")
        for output in outputs.get(kind, ())
    }


def _arguments(task: Object, called: Object) -> Iterator[str]:
    for kind in ("parameters", "artifacts"):
        argument_names = {argument["name"] for argument in task.get("arguments", {}).get(kind, ())}
        inputs = {item["name"]: item for item in called.get("inputs", {}).get(kind, ())}
        for name in sorted(argument_names - inputs.keys()):
            yield f"gives {kind[:-1]} {name!r}, which {called['name']} does not take"
        for name, item in inputs.items():
            supplied = {"value", "default", "valueFrom", "raw", "s3", "optional"} & item.keys()
            if name not in argument_names and not supplied:
                yield f"does not give {kind[:-1]} {name!r}, which {called['name']} needs"


def _references(template: Object, scope: set[str]) -> Iterator[str]:
    """Check the variables of a template outside its DAG."""
    for reference in _found({key: value for key, value in template.items() if key != "dag"}):
        if reference not in scope:
            yield f"refers to {reference}, which is not there"


def _found(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield from (match[1].strip() for match in _REFERENCE.finditer(node))
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _found(value)
    elif isinstance(node, Sequence):
        for value in node:
            yield from _found(value)


def _retries(template: Object) -> Iterator[str]:
    strategy = template.get("retryStrategy", {})
    for word in _WORD.findall(strategy.get("expression", "")):
        if word[0] not in "\"'" and word not in _IN_RETRIES:
            yield f"retryStrategy.expression refers to {word}, which is not there"
    factor = strategy.get("backoff", {}).get("factor", 1)
    if not re.fullmatch(r"[1-9][0-9]*", str(factor)):
        yield f"retryStrategy.backoff.factor {factor!r} is no whole number"
    if "maxDuration" in strategy.get("backoff", {}):
        yield "retryStrategy.backoff.maxDuration counts from the first start; use cap"


def _mounts(template: Object, whole: Object) -> Iterator[str]:
    volumes = {volume["name"] for volume in (*whole.get("volumes", ()), *template.get("volumes", ()))}
    for mount in template.get("container", {}).get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"mounts the volume {mount['name']!r}, which is not there"


def _outputs(template: Object) -> Iterator[str]:
    for kind in ("parameters", "artifacts"):
        for output in template.get("outputs", {}).get(kind, ()):
            path = output.get("path") or output.get("valueFrom", {}).get("path", "")
            if "container" in template and not path.startswith("/"):
                yield f"its output {output['name']!r} is read from {path!r}, which is no absolute path"
