"""Sources beyond the task list for a run on a KFP server: the steps' records in the store, the spec of the run, and
Kubernetes' messages about pods that do not start.

Each source has a time limit, and an unavailable one hides nothing of the rest.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.launch.kubernetes.classify import obstacle_of
from holdfast.launch.kubernetes.client import PODS, WORKFLOWS, Api, Object
from holdfast.pipelines.backends.explain import explained, known_of, store_named_by
from holdfast.pipelines.backends.interface import FAILED, PENDING, RUNNING, RunStatus, StepStatus
from holdfast.pipelines.backends.kubeflow.connection import Server
from holdfast.spec import parse_spec
from holdfast.spec.engine_text import text_of, unescape_tree
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.steps.parameter_overrides import changed_parameters

# The task list of a run on a KFP server: the nodes of its Argo Workflow.
#
# A row does not name its own node, only its child nodes, by their ids. An id is the workflow's name and the FNV-1a hash
# of the node's name, and that name is a path (`wf(0).root(0).exit-handler-1(0).train(0).executor(0)`). So the ids in
# the list determine the paths. One node can have several rows; only the newest is valid.

_BASIS, _PRIME, _BITS = 0x811C9DC5, 0x01000193, 0xFFFFFFFF  # FNV-1a, 32 bits
_TRY = re.compile(r"\(\d+\)$")
MAX_TRIES = 64  # of one node
EXECUTOR, DRIVER = "executor", "-driver"


@dataclass(frozen=True)
class Row:
    """One row of the task list."""

    name: str
    state: str  # empty: the node never began
    started: float | None  # unix seconds
    ended: float | None  # None while it runs
    error: str
    children: tuple[str, ...]  # node ids


class Tasks:
    """The task list of one run."""

    def __init__(self, run: Any) -> None:
        details = list((run.run_details.task_details if run.run_details else None) or ())
        self.rows = [_row(task) for task in details]
        self._ids = {child for row in self.rows for child in row.children}
        self._pods: dict[str, list[str]] | None = None

    def row(self, name: str) -> Row | None:
        """The newest row called `name`: the one with the later end, or one that began after it."""
        rows = [row for row in self.rows if row.name == name]
        return max(rows, key=lambda row: (row.ended or row.started or 0.0, row.ended is not None), default=None)

    def names(self) -> list[str]:
        """The distinct names in the list."""
        return list(dict.fromkeys(row.name for row in self.rows))

    def pods(self, name: str) -> tuple[str, ...]:
        """The node ids of the pods of the task `name`, oldest first."""
        if self._pods is None:
            self._pods = {}
            for task, node in self._executors():
                self._pods.setdefault(task, []).append(node)
        return tuple(self._pods.get(name, ()))

    @property
    def workflow(self) -> str:
        """The name of the Argo Workflow; empty before it has nodes."""
        return next((child.rpartition("-")[0] for child in sorted(self._ids)), "")

    def pending_since(self, pods: Sequence[str]) -> float | None:
        """The time since when the newest of a task's `pods` is pending, in unix seconds.

        None where it has begun, or where the list does not determine it.
        """
        executors = [row for row in self.rows if row.name == EXECUTOR and pods and pods[-1] in row.children]
        if not executors or any(row.ended is not None for row in executors):
            return None
        start = max(row.started or 0.0 for row in executors)
        tries = [row for row in self.rows if row.name == f"{EXECUTOR}({len(pods) - 1})" and row.started is not None]
        own_tries = [row for row in tries if (row.started == start if len(pods) == 1 else (row.started or 0.0) > start)]
        if not own_tries or any(row.state != "PENDING" for row in own_tries):
            return None
        return max(row.started or 0.0 for row in own_tries)

    def _executors(self) -> Iterator[tuple[str, str]]:
        """(task, id) of each node that is a pod of a task."""
        names = sorted({name for row in self.rows if "." not in (name := _TRY.sub("", row.name))})
        for workflow in sorted({child.rpartition("-")[0] for child in self._ids}):
            for path in self._below(workflow, workflow, _hash(workflow), names):
                *_, outer, last = ("", *path.split("."))
                if last.startswith(f"{EXECUTOR}("):
                    yield _TRY.sub("", outer), f"{workflow}-{_hash(path)}"

    def _below(self, workflow: str, path: str, known: int, names: list[str]) -> Iterator[str]:
        """The paths of the nodes below `path` whose ids are in the list."""
        if _TRY.search(path):
            outer = _TRY.sub("", path).rpartition(".")[2]
            parts = [] if outer == EXECUTOR or outer.endswith(DRIVER) else [f".{name}" for name in names]
        else:
            parts = [*(f"({number})" for number in range(MAX_TRIES)), ".onExit"]
        for part in parts:
            value = _hash(part, known)
            if f"{workflow}-{value}" in self._ids:
                yield path + part
                yield from self._below(workflow, path + part, value, names)


def _row(task: Any) -> Row:
    started, ended = task.start_time or task.create_time, task.end_time
    has_ended = started is not None and ended is not None and ended >= started
    return Row(
        str(task.display_name or ""),
        str(task.state or "").replace("RUNTIME_STATE_UNSPECIFIED", ""),
        started.timestamp() if started is not None else None,
        ended.timestamp() if has_ended else None,
        str(task.error.message or "") if task.error else "",
        tuple(child.pod_name for child in task.child_tasks or () if child.pod_name),
    )


def _hash(text: str, value: int = _BASIS) -> int:
    for byte in text.encode():
        value = ((value ^ byte) * _PRIME) & _BITS
    return value


PATIENCE = 3.0  # seconds for a request to Kubernetes
SLOW_POD = 120.0  # seconds after which a pod that has not begun is reported
KFP_NAMESPACE = "kubeflow"  # where a single-user installation runs its pods
MAX_WORDS = 400  # characters of a Kubernetes message
PASSING = ("ContainerCreating", "PodInitializing")

_warned: set[str] = set()  # workflows with a logged failure to reach Kubernetes

log = logging.getLogger("holdfast.kubeflow")


class Parameters:
    """The parameters of a run."""

    def __init__(self, server: Server, run: Any) -> None:
        parameters = (run.runtime_config.parameters if run.runtime_config else None) or {}
        self._given: dict[str, Any] = dict(unescape_tree(dict(parameters)))
        self._server, self._run = server, run

    @property
    def spec(self) -> str:
        """The text of the spec: the run's, otherwise the default of its pipeline."""
        value = self._given.get("spec") or self._default()
        return text_of(value) if value else ""

    @property
    def overrides(self) -> list[str]:
        """All changes to the spec, including those by parameters for single fields. Raises SpecError."""
        return [*changed_parameters(self._given, {}), *(self._given.get("overrides") or ())]

    @property
    def salt(self) -> str:
        """The salt, which separates runs of the same inputs."""
        return str(self._given.get("salt") or "")

    @property
    def store(self) -> str:
        """The root of the store; empty where neither a parameter nor the spec names one."""
        return str(self._given.get("store") or "") or store_named_by(self)

    def refusal(self) -> str:
        """Why the steps refuse the spec; empty if they accept it."""
        try:
            parse_spec(self.spec, self.overrides)
        except HoldfastError as error:
            return str(error)
        return ""

    def _default(self) -> Any:
        reference = self._run.pipeline_version_reference
        if reference is None or not reference.pipeline_version_id:
            return ""
        try:
            version = self._server.ask(
                self._server.pipelines.pipeline_service_get_pipeline_version,
                pipeline_id=reference.pipeline_id,
                pipeline_version_id=reference.pipeline_version_id,
            )
        except HoldfastError as error:
            log.debug("the pipeline of %s cannot be read: %s", self._run.run_id, error)
            return ""
        spec: Mapping[str, Any] = version.pipeline_spec or {}
        root = (spec.get("pipeline_spec") or spec).get("root", {})
        default = root.get("inputDefinitions", {}).get("parameters", {}).get("spec", {}).get("defaultValue", "")
        return unescape_tree(default)


def with_records(server: Server, run: Any, status: RunStatus, store: str, api: Callable[[], Api] | None) -> RunStatus:
    """Add to `status` the records of the store at `store` (default: the run's own) and of the cluster."""
    parameters = Parameters(server, run)
    status = explained(status, known_of(store or parameters.store, run.run_id, parameters, status))
    if status.state == FAILED:
        status = _with_refusal(status, parameters)
    return _with_pods(status, Tasks(run), run, api, server.namespace)


def _with_refusal(status: RunStatus, given: Parameters) -> RunStatus:
    """Explain a failed step without a record: parsing the spec here gives the same error."""
    failed = next((other for other in status.steps if other.state == FAILED), None)
    if failed is None or failed.error or failed.name == "notify" or not (refusal := given.refusal()):
        return status
    code = int(ExitCode.BAD_SPEC)
    step = replace(failed, error=f"exit code {code}: {refusal}", exit_code=code)
    steps = tuple(step if other is failed else other for other in status.steps)
    return replace(status, steps=steps, exit_code=code)


def _with_pods(status: RunStatus, tasks: Tasks, run: Any, api: Callable[[], Api] | None, namespace: str) -> RunStatus:
    """Report pods that do not start, and why a workflow failed before its first step."""
    slow = {step.name: since for step in status.steps if (since := _waits_since(step, tasks)) is not None}
    has_begun = any(step.seconds is not None and step.state not in ("NOT_BEGUN", "SKIPPED") for step in status.steps)
    failed_early = status.state == FAILED and not has_begun
    unexplained = any(step.state == FAILED and not step.error for step in status.steps)
    if not (slow or failed_early or unexplained or (status.unfinished and not has_begun)):
        return status
    messages: dict[str, str] = {}
    workflow, pod_namespace = tasks.workflow, namespace
    if workflow and api is not None:
        pod_namespace, messages = _complaints(api, workflow, namespace)
    pod_namespace = pod_namespace or KFP_NAMESPACE
    steps = tuple(_waiting(step, slow.get(step.name), messages, run.run_id, pod_namespace) for step in status.steps)
    of_steps = {message_text for step in steps if (message_text := messages.get(step.pods[-1] if step.pods else ""))}
    other_messages = [message_text for message_text in messages.values() if message_text not in of_steps]
    message = status.message or (other_messages[0] if other_messages else "")
    if failed_early and not message:
        account = run.service_account or "pipeline-runner"
        message = (
            "the workflow failed before its first step, and KFP does not say why. Does its service account exist? "
            f"kubectl -n {pod_namespace} get serviceaccount {account}; more: "
            f"kubectl -n {pod_namespace} describe workflow {workflow}"
        )
    return replace(status, steps=steps, message=message)


def _waits_since(step: StepStatus, tasks: Tasks) -> float | None:
    """The time since when the pod of a step is pending, in unix seconds; None where it has begun."""
    if step.state not in (RUNNING, PENDING) or step.error.startswith("waits:"):
        return None
    return tasks.pending_since(step.pods)


def _waiting(
    step: StepStatus, since: float | None, found: Mapping[str, str], kfp_run_id: str, namespace: str
) -> StepStatus:
    if since is None:
        message = found.get(step.pods[-1]) if step.pods and step.state == FAILED and not step.error else None
        return replace(step, error=message) if message else step
    if step.pods and (message := found.get(step.pods[-1])):
        return replace(step, state=PENDING, error=message)
    if time.time() - since < SLOW_POD:
        return replace(step, state=PENDING)
    minutes = int((time.time() - since) // 60)
    look = f"kubectl -n {namespace} describe pods -l pipeline/runid={kfp_run_id}"
    return replace(step, state=PENDING, error=f"its pod has not begun for {minutes} minutes; look with: {look}")


def _complaints(api: Callable[[], Api], workflow: str, namespace: str) -> tuple[str, dict[str, str]]:
    """The namespace of a workflow, and a message for each node that does not start or has failed, by node id.

    The messages come from the Workflow and its pods. Empty where Kubernetes is unavailable.
    """
    try:
        connected = api()
        for candidate in dict.fromkeys(filter(None, (namespace, connected.namespace, KFP_NAMESPACE))):
            inside = connected.within(candidate, patience=PATIENCE)
            if (stored := inside.get(WORKFLOWS, workflow)) is not None:
                pods, _ = inside.list(PODS, f"workflows.argoproj.io/workflow={workflow}")
                return candidate, dict(_of_workflow(stored)) | dict(_of_pods(pods, workflow))
    except (HoldfastError, OSError) as error:
        if workflow not in _warned:  # once, because `watch` and `logs --follow` poll every few seconds
            _warned.add(workflow)
            log.warning("Kubernetes cannot be queried about %s: %s", workflow, error)
    return namespace, {}


def _of_workflow(workflow: Object) -> Iterator[tuple[str, str]]:
    status = workflow.get("status", {})
    for identity, node in (status.get("nodes") or {}).items():
        text = " ".join(str(node.get("message") or "").split())[:MAX_WORDS]
        stuck = node.get("type") == "Pod" and node.get("phase") in ("Pending", "Error", "Failed")
        if text and stuck and not text.startswith(PASSING):
            yield identity, text
    if message := str(status.get("message") or ""):
        yield workflow["metadata"]["name"], message[:MAX_WORDS]


def _of_pods(pods: list[Object], workflow: str) -> Iterator[tuple[str, str]]:
    for pod in pods:
        if (obstacle := obstacle_of(pod, "main", 0, 0.0)) is not None:
            text = obstacle.symptom.words.partition("; cluster.pending_timeout_minutes")[0]
            yield f"{workflow}-{pod['metadata']['name'].rpartition('-')[2]}", text[:MAX_WORDS]
