"""A small Argo: runs the containers of WorkflowTemplates as local processes, as the controller runs pods.

It implements what Argo documents and the emitted objects rely on. It puts parameters into a template's JSON, reads
outputs from files, evaluates `when` and `retryStrategy.expression`, and always runs an exit handler. It never waits:
backoffs are recorded, not slept.
"""

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import warm

Object = dict[str, Any]
LOST = -1  # exit code of a pod that was lost with its node

_REFERENCE = re.compile(r"\{\{(.*?)\}\}")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass
class Node:
    """A task of a DAG, or the exit handler."""

    name: str
    template: str
    phase: str  # Succeeded, Failed, Error, Skipped (by `when`) or Omitted (by a failure before it)
    codes: list[int] = field(default_factory=list)  # of each try
    message: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)  # seconds before each further try
    progress: str = ""
    log: str = ""


@dataclass
class Workflow:
    """A Workflow that has ended."""

    phase: str
    nodes: dict[str, Node]

    @property
    def log(self) -> str:
        """The output of all nodes."""
        return "\n".join(f"--- {node.name}: {node.phase}\n{node.log}" for node in self.nodes.values())


class Argo:
    """A namespace with objects. `instead`: the codes with which the first tries of a template end without a start."""

    def __init__(self, objects: Sequence[Object], folder: Path, environment: Mapping[str, str]) -> None:
        self._objects = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in objects}
        self._folder, self.environment = folder, environment
        self._runs = 0
        self.instead: dict[str, list[int]] = {}

    def fire(self, cron: str) -> Workflow:
        """Run the workflow of a CronWorkflow, as at a scheduled time."""
        return self.submit(self._objects[("CronWorkflow", cron)]["spec"]["workflowSpec"])

    def submit(self, spec: Object, **parameters: str) -> Workflow:
        """Run a workflow's spec, merged over the template that it names, to its end."""
        whole = {**self._objects[("WorkflowTemplate", spec["workflowTemplateRef"]["name"])]["spec"], **spec}
        self._runs += 1
        scope = {
            "workflow.name": f"run-{self._runs}",
            "workflow.uid": str(uuid.uuid4()),
            "workflow.namespace": "test",
        }
        for parameter in whole["arguments"]["parameters"]:
            scope[f"workflow.parameters.{parameter['name']}"] = parameters.pop(parameter["name"], parameter["value"])
        assert not parameters, f"no such parameters: {parameters}"
        execution = _Execution(self, whole, scope)
        phase, _ = execution.template(whole["entrypoint"], {}, whole["entrypoint"])
        ended = list(execution.nodes.values())
        failures = [
            {"displayName": node.name, "templateName": node.template, "message": node.message, "phase": node.phase}
            for node in ended
            if node.phase in ("Failed", "Error")
        ]
        # Argo quotes this value once more, so that it survives the insertion into JSON.
        scope |= {"workflow.status": phase, "workflow.failures": json.dumps(json.dumps(failures))}
        handler_phase, _ = execution.template(whole["onExit"], {}, "onExit")
        return Workflow(phase if handler_phase == "Succeeded" else "Error", execution.nodes)


class _Execution:
    def __init__(self, argo: Argo, spec: Object, scope: dict[str, str]) -> None:
        self.argo, self.scope = argo, scope
        self.templates = {template["name"]: template for template in spec["templates"]}
        self.nodes: dict[str, Node] = {}

    def template(self, name: str, inputs: dict[str, str], node: str) -> tuple[str, dict[str, str]]:
        """Run a template and return its phase and outputs."""
        template = self.templates[name]
        wanted = {parameter["name"] for parameter in template.get("inputs", {}).get("parameters", ())}
        assert inputs.keys() == wanted, f"{name} wants {wanted} and gets {inputs.keys()}"
        scope = self.scope | {f"inputs.parameters.{key}": value for key, value in inputs.items()}
        if "dag" in template:
            return self._dag(template["dag"], scope, node), {}
        return self._retried(substituted(template, scope), node)

    def _dag(self, dag: Object, scope: dict[str, str], node: str) -> str:
        tasks, phases = dag["tasks"], dict[str, str]()
        for task in tasks:  # a valid order, as the tests of the template check
            name = task["name"]
            if not depends(task.get("depends", ""), phases):
                self.nodes[name] = Node(name, task["template"], "Omitted")
            elif "when" in task and not condition(substituted(task["when"], scope)):
                self.nodes[name] = Node(name, task["template"], "Skipped")
            elif "withParam" in task:
                self.nodes[name] = Node(name, task["template"], self._each(task, scope))
            else:
                parameters = substituted(task.get("arguments", {}), scope).get("parameters", ())
                phase, outputs = self.template(
                    task["template"], {parameter["name"]: parameter["value"] for parameter in parameters}, name
                )
                self.nodes.setdefault(name, Node(name, task["template"], phase))
                scope = scope | {f"tasks.{name}.outputs.parameters.{key}": value for key, value in outputs.items()}
            phases[name] = self.nodes[name].phase
        targets = dag.get("target", "").split() or list(phases)
        failed = [phases[target] for target in targets if phases[target] in ("Failed", "Error")]
        return failed[0] if failed else "Failed" if self._omitted(targets, phases, tasks) else "Succeeded"

    def _omitted(self, targets: list[str], phases: dict[str, str], tasks: list[Object]) -> bool:
        """Whether a target is omitted because a task before it failed; that counts as its failure."""
        before = {task["name"]: re.findall(r"(?<![.\w-])[a-z][\w-]*", task.get("depends", "")) for task in tasks}

        def fails(name: str) -> bool:
            if phases[name] != "Omitted":
                return phases[name] in ("Failed", "Error")
            return any(fails(task_name) for task_name in before[name])

        return any(fails(target) for target in targets)

    def _each(self, task: Object, scope: dict[str, str]) -> str:
        """Run a task once for each item of a list, in nodes named by number and item; an empty list is skipped."""
        phases = []
        for number, item in enumerate(json.loads(substituted(task["withParam"], scope))):
            parameters = substituted(task["arguments"], scope | {"item": item})["parameters"]
            inputs = {parameter["name"]: parameter["value"] for parameter in parameters}
            phases.append(self.template(task["template"], inputs, f"{task['name']}({number}:{item})")[0])
        failed = [phase for phase in phases if phase != "Succeeded"]
        return failed[0] if failed else "Succeeded" if phases else "Skipped"

    def _retried(self, template: Object, name: str) -> tuple[str, dict[str, str]]:
        node = self.nodes[name] = Node(name, template["name"], "Running")
        strategy, backoff = template["retryStrategy"], template["retryStrategy"]["backoff"]
        wait = seconds(backoff["duration"])
        while True:
            self._once(template, node)
            if node.phase == "Succeeded":
                break
            last = {"lastRetry": SimpleNamespace(exitCode=str(node.codes[-1]), status=node.phase), "asInt": int}
            if len(node.codes) > int(strategy["limit"]) or not holds(strategy["expression"], last):
                break
            node.waits.append(wait)
            wait = min(wait * int(backoff["factor"]), seconds(backoff["cap"]))
        return node.phase, node.outputs

    def _once(self, template: Object, node: Node) -> None:
        planned_codes = self.argo.instead.get(node.template, [])
        if planned_codes:
            node.codes.append(planned_codes.pop(0))
        else:
            name = re.sub(r"[^\w.-]", "-", node.name)
            root = self.argo._folder / f"{self.scope['workflow.name']}-{name}-{len(node.codes)}"
            node.codes.append(self._process(template, node, root))
            if node.codes[-1] == 0:
                self._collect(template, node, root)
        node.phase = {0: "Succeeded", LOST: "Error"}.get(node.codes[-1], "Failed")
        lines = node.log.strip().splitlines()
        node.message = "" if node.phase == "Succeeded" else f"Error (exit code {node.codes[-1]}): {lines[-1:]}"

    def _process(self, template: Object, node: Node, root: Path) -> int:
        container, outputs = template["container"], template.get("outputs", {})
        files = {artifact["path"]: artifact["raw"]["data"] for artifact in template["inputs"]["artifacts"]}
        files |= {artifact["path"]: "" for artifact in outputs.get("artifacts", ())}
        folders = {str(Path(parameter["valueFrom"]["path"]).parent) for parameter in outputs.get("parameters", ())}
        folders |= {str(Path(artifact["path"]).parent) for artifact in outputs.get("artifacts", ())}
        for path, data in files.items():
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            if data:
                (root / path[1:]).write_text(data)
        argv = [_placed(argument, root, {*files, *folders}) for argument in (*container["command"], *container["args"])]
        values = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
        environment = {**values, **self.argo.environment, "ARGO_PROGRESS_FILE": str(root / "progress")}
        with warm.popen(
            [sys.executable, *argv[1:]],
            environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            output, _ = process.communicate()
        node.log += output
        if (root / "progress").exists():
            node.progress = (root / "progress").read_text().strip()
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _collect(self, template: Object, node: Node, root: Path) -> None:
        for output in template.get("outputs", {}).get("parameters", ()):
            node.outputs[output["name"]] = (root / output["valueFrom"]["path"][1:]).read_text()
        for artifact in template.get("outputs", {}).get("artifacts", ()):
            node.artifacts[artifact["name"]] = root / artifact["path"][1:]


def substituted(node: Any, scope: Mapping[str, str]) -> Any:
    """`node` with every reference replaced in its JSON, as Argo does it. A reference to nothing is an error."""
    text = _REFERENCE.sub(lambda match: json.dumps(scope[match[1].strip()])[1:-1], json.dumps(node))
    return json.loads(text)


def depends(expression: str, phases: Mapping[str, str]) -> bool:
    """Whether a task may begin. A bare name means that the task succeeded or was skipped by its condition."""

    def one(match: re.Match[str]) -> str:
        name, _, result = match[0].partition(".")
        expected = {"": ("Succeeded", "Skipped"), "Errored": ("Error",)}.get(result, (result,))
        return str(phases[name] in expected)

    formula = re.sub(r"[\w-]+(?:\.\w+)?", one, expression)
    return not formula or holds(formula, {"True": True, "False": False})


def condition(when: str) -> bool:
    """Evaluate a `when` of the only form in use."""
    match = re.fullmatch(r"'([^']*)' == '([^']*)'", when)
    assert match is not None, when
    return match[1] == match[2]


def holds(expression: str, names: Mapping[str, object]) -> bool:
    """Evaluate an expression of expr-lang, as far as it is in use."""
    return bool(eval(expression.replace("||", " or ").replace("&&", " and "), {"__builtins__": {}}, dict(names)))


def seconds(duration: str) -> int:
    """A duration such as 15s."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def _placed(argument: str, root: Path, paths: set[str]) -> str:
    """An argument; a value that is one of the container's paths gets that path below `root`."""
    name, equals, value = argument.partition("=")
    return f"{name}{equals}{root}{value}" if value in paths else argument
