"""Argo Workflows as a backend (`holdfast.pipelines.backends.interface`), through the Kubernetes API.

A Workflow is named after the run, and the API server accepts a name once. So concurrent submissions, or one that is
repeated after a lost response, make one Workflow. A new Workflow with the next number follows a failed one.
"""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from holdfast.launch.kubernetes.api_errors import ConflictError, TransientError
from holdfast.launch.kubernetes.client import PODS, WORKFLOWS, Api, Object, Resource
from holdfast.launch.kubernetes.output import text_lines
from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.argo.contexts import PATIENCE_SECONDS, Notes, submit_in_order
from holdfast.pipelines.backends.argo.emit import argo_objects, sweep_objects
from holdfast.pipelines.backends.argo.template import labels, template_called, template_name, text_of
from holdfast.pipelines.backends.explain import explained, known_of, store_named_by
from holdfast.pipelines.backends.interface import (
    CANCELED,
    FAILED,
    NOT_BEGUN,
    PENDING,
    RUNNING,
    SUCCEEDED,
    RunStatus,
    StepStatus,
    ended_with,
    is_step,
    require_one_run,
    step_called,
)
from holdfast.pipelines.backends.rank_shell import RankShell, in_pod
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.sizes import require_fits_argo
from holdfast.runtime.exits import code_in
from holdfast.runtime.logs import plain
from holdfast.spec.engine_text import unescape
from holdfast.spec.errors import ClusterUnreachableError, MissingError
from holdfast.spec.identity import digest
from holdfast.spec.json_parsing import parse_json_value
from holdfast.steps import STEPS
from holdfast.steps.parameter_overrides import changed_parameters

# Arguments of a Workflow: its own parameters, and the defaults of its template.


class Arguments:
    """The parameters of a Workflow with the defaults of its template, unescaped."""

    def __init__(self, workflow: Object) -> None:
        stored = workflow.get("status", {}).get("storedWorkflowTemplateSpec") or {}
        self._compiled, parameters = _values(stored), _values(workflow["spec"])
        self._given = {**self._compiled, **parameters}

    @property
    def spec(self) -> str:
        """The text of the spec: the Workflow's, otherwise the template's default."""
        return self._given.get("spec", "")

    @property
    def overrides(self) -> list[str]:
        """All changes to the spec, including those by parameters for single fields. Raises SpecError and DataError."""
        fields = {name: text for name, text in self._given.items() if text != self._compiled.get(name)}
        overrides = parse_json_value(self._given.get("overrides") or "[]", "overrides")
        return [*changed_parameters(fields, {}), *map(str, overrides if isinstance(overrides, list) else ())]

    @property
    def salt(self) -> str:
        """The salt, which separates runs of the same inputs."""
        return self._given.get("salt", "")

    @property
    def store(self) -> str:
        """The root of the store; empty where neither a parameter nor the spec names one."""
        return self._given.get("store", "") or store_named_by(self)


def _values(spec: Object) -> dict[str, str]:
    """The parameters of a Workflow or of its template, unescaped."""
    parameters = spec.get("arguments", {}).get("parameters") or ()
    return {parameter["name"]: unescape(str(parameter.get("value") or "")) for parameter in parameters}


TEMPLATES = Resource("argoproj.io", "v1alpha1", "workflowtemplates")
RUN_LABEL, ORDER_LABEL, WORKFLOW_LABEL = "holdfast.dev/run", "holdfast.dev/order", "workflows.argoproj.io/workflow"
SELECTOR = ",".join(f"{name}={value}" for name, value in labels().items())
NODE = "workflows.argoproj.io/node-id"
STATES = {"": PENDING, "Pending": PENDING, "Running": RUNNING, "Succeeded": SUCCEEDED, "Omitted": NOT_BEGUN}
MAX_LABEL = 63  # characters; Argo refuses a Workflow with a longer name
CONFLICTS = 5  # tries of a write that conflicts with another writer
POLL_SECONDS = 2.0


class Argo:
    """A namespace of a cluster with Argo's controller."""

    name = "argo"
    capabilities = capabilities.ARGO

    def __init__(self, namespace: str = "", api: Api | None = None, context: str = "") -> None:
        """`namespace`: default, that of the pod or the kubeconfig. `api`: default, connected on first use. `context` of
        the kubeconfig: default, the first of the spec's that takes a run, else the current one."""
        self._namespace, self._connected, self._context = namespace, api, context
        self._is_fixed = bool(context or api)

    @property
    def _api(self) -> Api:
        if self._connected is None:
            namespace = self._namespace or None
            if self._context:
                self._connected = Api.of_this_process(namespace, PATIENCE_SECONDS, self._context)
            else:
                self._connected = Api.of_this_process(namespace)
        return self._connected

    def objects(self, request: RunRequest) -> list[Object]:
        """The WorkflowTemplate and the Workflow that `submit` would send."""
        namespace = self._connected.namespace if self._connected else self._namespace or request.spec.cluster.namespace
        template, workflow = _template(request, namespace), _workflow(request, namespace, 1)
        require_fits_argo(
            [template],
            {parameter["name"]: parameter["value"] for parameter in workflow["spec"]["arguments"]["parameters"]},
        )
        return [template, workflow]

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Apply the template, and create the Workflow unless one of this request runs or has succeeded. If no context
        is named, the first one of the spec that takes it gets it."""
        if request.spec.cluster.contexts and not self._is_fixed:
            places = [Argo(self._namespace, context=context) for context in request.spec.cluster.contexts]
            url = request.store or request.spec.store or os.environ.get("HOLDFAST_STORE", "")
            chosen, made = submit_in_order(places, request, Notes(url, _digest_of(request)))
            self._connected, self._context = chosen._connected, chosen._context
            return made
        self._use_namespace_of(request)
        template, _ = self.objects(request)
        self._apply(template)
        while True:
            status, workflow = self._next(request)
            if status is not None:
                return status, False
            try:
                return self._status(self._api.create(WORKFLOWS, workflow)), True
            except ConflictError:  # another client was faster, or the response to our own request was lost
                continue

    @property
    def context(self) -> str:
        """The context of the kubeconfig; empty: the current one."""
        return self._context

    def submitted(self, request: RunRequest) -> RunStatus | None:
        """The Workflow of a request that runs or has succeeded. Changes nothing."""
        self._use_namespace_of(request)
        return self._next(request)[0]

    def _use_namespace_of(self, request: RunRequest) -> None:
        if not self._namespace and self._connected is None:
            self._namespace = request.spec.cluster.namespace or ""

    def _next(self, request: RunRequest) -> tuple[RunStatus | None, Object]:
        """The Workflow of a request that runs or has succeeded, or else the one to create."""
        number = 0
        while True:
            number += 1
            workflow = _workflow(request, self._api.namespace, number)
            existing = self._api.get(WORKFLOWS, workflow["metadata"]["name"])
            status = None if existing is None else self._status(existing)
            if status is None or status.unfinished or (status.state == SUCCEEDED and request.run_id):
                return status, workflow

    def status(self, run: str) -> RunStatus:
        """The status of a Workflow and its nodes, with the records of its steps in the store."""
        workflow = self._find(run)
        status, arguments = self._status(workflow, self._steps(workflow)), Arguments(workflow)
        return explained(status, known_of(arguments.store, status.job, arguments, status))

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """The output of the steps' pods. A deleted pod has none."""
        line_counts: dict[str, int] = {}  # lines for each pod
        while True:
            workflow = self._find(run)
            status = self._status(workflow, self._steps(workflow))
            for step_status in status.steps:
                for pod in step_status.pods if is_step(step, step_status.name) else ():
                    for line in self._new_lines(pod, line_counts):
                        yield step_status.name, line
            if not follow or not status.unfinished:
                break
            time.sleep(POLL_SECONDS)
        if not line_counts:
            raise MissingError(
                f"{status.name}: there is no log of {step or 'any step'}: it has not begun, or its pod is gone; the "
                "artifact repository keeps logs, and `holdfast show --steps` has the steps"
            )

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """Stop a Workflow. Its pods get SIGTERM and save, and the exit handler still runs."""
        for _ in range(CONFLICTS):
            workflow = self._find(run)
            status = self._status(workflow)
            if not status.unfinished:
                return status, False
            workflow["spec"]["shutdown"] = "Stop"
            try:
                return self._status(self._api.replace(WORKFLOWS, workflow)), True
            except ConflictError:
                continue
        raise ClusterUnreachableError(f"{run}: changes all the time; run the same command again")

    def list(self) -> list[RunStatus]:
        """Holdfast's Workflows in the namespace, newest first."""
        workflows, _ = self._api.list(WORKFLOWS, SELECTOR)
        return [self._status(workflow) for workflow in sorted(workflows, key=_made, reverse=True)]

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """`kubectl exec` in the pod of the rank."""
        return in_pod(shell, self._context)

    def resume(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Submit the request again. A new Workflow follows a failed one and resumes its training."""
        return self.submit(request)

    def _apply(self, template: Object) -> None:
        for _ in range(CONFLICTS):
            existing = self._api.get(TEMPLATES, template["metadata"]["name"])
            try:
                if existing is None:
                    self._api.create(TEMPLATES, template)
                elif existing["spec"] != template["spec"]:
                    version = existing["metadata"]["resourceVersion"]
                    metadata = {**template["metadata"], "resourceVersion": version}
                    self._api.replace(TEMPLATES, {**template, "metadata": metadata})
                return
            except ConflictError:
                continue
        raise ClusterUnreachableError(
            f"{template['metadata']['name']}: changes all the time; run the same command again"
        )

    def _find(self, wanted: str) -> Object:
        if wanted and (exact := self._api.get(WORKFLOWS, wanted)) is not None:
            return exact
        workflows, _ = self._api.list(WORKFLOWS, SELECTOR)
        matches = [
            workflow
            for workflow in workflows
            if wanted
            and (
                workflow["metadata"]["uid"] == wanted
                or _run_id(workflow).startswith(wanted)
                or workflow["spec"].get("workflowTemplateRef", {}).get("name") == template_called(wanted)
            )
        ]
        require_one_run(wanted, (_run_id(workflow) for workflow in matches if _run_id(workflow).startswith(wanted)))
        if not matches:
            raise MissingError(
                f"{wanted!r}: no Workflow in namespace {self._api.namespace} has that id or name; "
                "`holdfast runs --backend argo` shows all of them"
            )
        return max(matches, key=_made)

    def _steps(self, workflow: Object) -> tuple[StepStatus, ...]:
        name = workflow["metadata"]["name"]
        pods, _ = self._api.list(PODS, f"{WORKFLOW_LABEL}={name}")
        by_node = {pod["metadata"].get("annotations", {}).get(NODE, ""): pod["metadata"]["name"] for pod in pods}
        nodes = list(workflow.get("status", {}).get("nodes", {}).values())
        steps = []
        for step in STEPS:
            by_name: dict[str, list[Object]] = {}  # in a sweep, one entry for each trial
            for node in (node for node in nodes if node.get("templateName") == step):
                by_name.setdefault(_called(node, step), []).append(node)
            for task_name, task_nodes in sorted(by_name.items(), key=lambda one: (len(one[0]), one[0])):
                steps.append(_step(task_name, task_nodes, by_node))
        return tuple(steps)

    def _new_lines(self, pod: str, shown: dict[str, int]) -> Iterator[str]:
        try:
            with self._api.log(pod, "main", follow=False) as lines:
                texts = text_lines(lines)
        except (MissingError, TransientError):
            return
        new = texts[shown.get(pod, 0) :]
        shown[pod] = len(texts)
        yield from map(plain, new)

    def _status(self, workflow: Object, steps: tuple[StepStatus, ...] = ()) -> RunStatus:
        metadata, status = workflow["metadata"], workflow.get("status", {})
        phase = status.get("phase", "")
        state = STATES.get(phase, FAILED)
        if state == FAILED and workflow["spec"].get("shutdown"):
            state = CANCELED
        name, message = metadata["name"], status.get("message", "") if state == FAILED else ""
        link, code = f"workflows/{self._api.namespace}/{name}", ended_with(state, steps)
        uid = metadata.get("uid", "")
        return RunStatus(self.name, name, name, state, link, message, steps, code, uid, endpoint=self._context)


_BAD = ("FAILED", "ERROR")
NOT_AGAIN = "retryStrategy.expression evaluated to false"  # Argo's message for a permanent failure


def _called(node: Object, step: str) -> str:
    """The name of a node's task. A retry has the same name and a number in brackets."""
    task = str(node.get("displayName", step)).partition("(")[0]
    return task if step_called(task) == step else step


def _step(name: str, nodes: list[Object], pods: dict[str, str]) -> StepStatus:
    # Where the template has retries, the node that covers all tries has the state of the step.
    top_node = next((node for node in nodes if node["type"] != "Pod"), nodes[-1])
    tries = sorted((node for node in nodes if node["type"] == "Pod"), key=lambda one: one.get("startedAt") or "")
    names = tuple(pods[node["id"]] for node in tries if node["id"] in pods)
    seconds = _seconds(top_node.get("startedAt"), top_node.get("finishedAt"))
    state = STATES.get(top_node.get("phase", ""), str(top_node.get("phase", "")).upper())
    if state == RUNNING and tries and STATES.get(tries[-1].get("phase", "")) == PENDING:
        state, top_node = PENDING, tries[-1]  # only the pod's node has the reason for waiting
    message = top_node.get("message", "") if state in (*_BAD, PENDING) else ""
    if state in _BAD and message == NOT_AGAIN and tries:
        message = tries[-1].get("message") or message
    codes = [str(node.get("outputs", {}).get("exitCode", "")) for node in (top_node, *reversed(tries))]
    code_text = next(filter(str.isdecimal, codes), "") if top_node.get("finishedAt") else ""
    code = int(code_text) if code_text else code_in(message)
    return StepStatus(name, state, seconds, message, names, code)


def _template(request: RunRequest, namespace: str | None) -> Object:
    image = request.image or None
    if request.trials:
        return sweep_objects(
            request.spec, request.trials, concurrent_trials=request.concurrent_trials, image=image, namespace=namespace
        )[0]
    return argo_objects(request.spec, image=image, namespace=namespace)[0]


def _workflow(request: RunRequest, namespace: str | None, number: int) -> Object:
    """The Workflow of a request; `number` counts the Workflows of the same request."""
    request_digest = _digest_of(request)[:8]
    suffix, template = f"-{request_digest}-{number}", template_name(request.spec, "-sweep" if request.trials else "")
    name = template[: MAX_LABEL - len(suffix)] + suffix  # the name is also a label of the pods
    run = {RUN_LABEL: request.run_id} if request.run_id else {}
    parameters = [
        {"name": key, "value": text_of(key, value, request.spec)} for key, value in request.parameters().items()
    ]
    account = {"serviceAccountName": request.service_account} if request.service_account else {}
    metadata = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": name, **metadata, "labels": {**labels(), **run, ORDER_LABEL: request_digest}},
        "spec": {
            "workflowTemplateRef": {"name": template},
            "arguments": {"parameters": parameters},
            **account,
        },
    }


def _digest_of(request: RunRequest) -> str:
    return digest([request.question(), request.image, *([request.trials] if request.trials else [])])


def _run_id(workflow: Object) -> str:
    return str(workflow["metadata"].get("labels", {}).get(RUN_LABEL, ""))


def _made(workflow: Object) -> tuple[str, str]:
    return workflow["metadata"].get("creationTimestamp", ""), workflow["metadata"]["name"]


def _seconds(started: Any, finished: Any) -> float | None:
    if not started:
        return None
    start = datetime.fromisoformat(started).timestamp()
    return (datetime.fromisoformat(finished).timestamp() if finished else time.time()) - start
