"""Classification of pods: why a pod ended or does not start. Pure functions of the pod, as the API returns it.

Each result has an exit code, a message with the remedy, and whether the node is blamed. Why a pod does not appear at
all (a quota, an admission policy, a missing account or volume), only the events of its job show: `watch.PodEvents`
queries them, and `classify_message` classifies their text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.launch.exits import RankExit, parse_exit_report, root_cause
from holdfast.launch.kubernetes.api_errors import POD_ACCOUNTS
from holdfast.launch.kubernetes.client import Object
from holdfast.spec.errors import ExitCode

# Codes that healthy nodes do not cause: fatal signals of the hardware kind, a hang, a full disk, wrong bits.
_BAD_NODE_CODES = frozenset(
    {134, 135, 136, 139, ExitCode.HUNG, ExitCode.NO_SPACE, ExitCode.WRONG_ARITHMETIC, ExitCode.UNHEALTHY_NODE}
)
_BAD_NODE_REASONS = frozenset(
    {"NodeLost", "UnexpectedAdmissionError", "ContainerStatusUnknown", "Evicted", "NodeShutdown", "Terminated"}
)
_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_NEVER_STARTED = frozenset({"StartError", "ContainerCannotRun"})
# Words of an event -> the exit code of a job that waits too long because of it, and the remedy.
_REMEDIES: tuple[tuple[str, ExitCode, str], ...] = (
    (
        "exceeded quota",
        ExitCode.UNSCHEDULABLE,
        "ask for less in cluster.resources, or raise it: kubectl describe quota",
    ),
    ("violates podsecurity", ExitCode.ACCESS_DENIED, "the namespace enforces it: kubectl get namespace --show-labels"),
    (POD_ACCOUNTS, ExitCode.ACCESS_DENIED, "check cluster.service_account, or allow it as the message says"),
    ("serviceaccount", ExitCode.NOT_FOUND, "check cluster.service_account"),
    ("service account", ExitCode.NOT_FOUND, "check cluster.service_account"),
    ("persistentvolumeclaim", ExitCode.NOT_FOUND, "check cluster.volumes"),
    ("admission webhook", ExitCode.ACCESS_DENIED, "ask who runs the webhook"),
    ("is forbidden", ExitCode.ACCESS_DENIED, "ask who runs the cluster"),
)


@dataclass(frozen=True)
class Symptom:
    """How one pod ended, or why it does not start."""

    pod: str
    node: str
    rank: int  # of the node in the job
    code: int
    words: str
    blames_node: bool = False
    process: RankExit | None = None  # the process of this node that explains its end, if torchrun reported it
    reclaimed: bool = False  # the cloud reclaimed its node

    def __str__(self) -> str:
        place = f" on node {self.node}" if self.node else ""
        return f"node rank {self.rank} (pod {self.pod}{place}): {self.words}"


@dataclass(frozen=True)
class Obstacle:
    """Why a pod does not start, and how long that may last."""

    symptom: Symptom
    patience: float  # seconds; after that, the job ends


def end_of(pod: Object, container: str, rank: int) -> Symptom | None:  # noqa: PLR0911
    """How the pod ended; None while it runs or waits, and if it succeeded."""
    status = pod.get("status", {})
    reason, message = status.get("reason", ""), status.get("message", "")
    disruption = _condition(pod, "DisruptionTarget")
    state = _state(pod, container).get("terminated")
    leaving = pod["metadata"].get("deletionTimestamp") is not None

    def symptom(code: int, words: str, blames_node: bool = False) -> Symptom:
        return Symptom(
            pod["metadata"]["name"], pod.get("spec", {}).get("nodeName", ""), rank, int(code), words, blames_node
        )

    if reason == "NodeLost" or (leaving and _reason_of(disruption) == "DeletionByTaintManager" and state is None):
        return symptom(ExitCode.KILLED, f"its node was lost{_after(message or _message(disruption))}", True)
    if status.get("phase") == "Unknown":
        return symptom(ExitCode.KILLED, f"its node does not answer{_after(message)}", True)
    if state is not None and not (status.get("phase") == "Failed" and reason == "Evicted"):
        return _terminated(state, disruption, symptom)
    if status.get("phase") == "Failed" and (before := _failed_before(pod)) is not None:
        name, ended = before
        words = f"its container {name}, which runs before the ranks, ended with {ended.get('exitCode')}"
        return symptom(ExitCode.KILLED, words + _after(ended.get("message", "") or ended.get("reason", "")))
    if status.get("phase") == "Failed":
        if reason in ("Preempting", "Preempted") or _reason_of(disruption) == "PreemptionByScheduler":
            return symptom(ExitCode.KILLED, f"preempted{_after(message or _message(disruption))}")
        words = {"Evicted": "evicted by its node"}.get(reason, f"failed ({reason or 'no reason given'})")
        if reason == "DeadlineExceeded":
            return symptom(ExitCode.CANCELLED, "ran longer than cluster.deadline_hours")
        return symptom(ExitCode.KILLED, words + _after(message), _is_bad_node(reason))
    return None


def _terminated(state: Object, disruption: Object, symptom: Callable[..., Symptom]) -> Symptom | None:
    code, reason = state.get("exitCode", 0), state.get("reason", "")
    if code == 0:
        return None
    if reason == "OOMKilled":
        return symptom(ExitCode.KILLED, "out of memory (OOMKilled); ask for more in cluster.resources.memory")
    if reason in _NEVER_STARTED:
        return symptom(
            ExitCode.BAD_SPEC, f"its container could not start{_after(state.get('message', ''))}; check cluster.image"
        )
    if reason == "ContainerStatusUnknown":
        return symptom(ExitCode.KILLED, "it is unknown how its container ended; its node was away", True)
    report = parse_exit_report(state.get("message") or "")  # written by torchrun, unless it was killed
    description = _in_words(code) + _after(report.detail if report is not None else "")
    cause = report.cause if report is not None else None
    if report is not None and report.blames_node:
        return replace(symptom(code, f"{description}, and blames its node", True), process=cause)
    if disruption:
        description += f", evicted by the cluster ({disruption.get('reason')}){_after(_message(disruption))}"
    result = symptom(code, description, code in _BAD_NODE_CODES and not disruption)
    return replace(result, process=cause, reclaimed=report is not None and report.reclaimed)


def obstacle_of(pod: Object, container: str, rank: int, pending_seconds: float) -> Obstacle | None:
    """Why the pod does not start; None if nothing blocks it."""
    name, node = pod["metadata"]["name"], pod.get("spec", {}).get("nodeName", "")
    held_up, waiting_state = _waiting(pod)
    reason, message = waiting_state.get("reason", ""), waiting_state.get("message", "")
    whose = "its" if held_up in ("", container) else f"container {held_up}'s"
    if reason in _IMAGE:
        denied = any(word in message.lower() for word in ("unauthorized", "denied", "forbidden"))
        code = ExitCode.ACCESS_DENIED if denied else ExitCode.NOT_FOUND
        description = (
            f"{whose} image cannot be pulled ({reason}){_after(message)}; check cluster.image and the pull secrets"
        )
        patience = 0.0 if reason == "InvalidImageName" else 180.0
        return Obstacle(Symptom(name, node, rank, code, description), patience)
    if reason in _CONFIG:
        container_name = "its container" if held_up in ("", container) else f"its container {held_up}"
        description = (
            f"{container_name} cannot be made ({reason}){_after(message)}; check cluster.secrets and cluster.volumes"
        )
        return Obstacle(Symptom(name, node, rank, ExitCode.NOT_FOUND, description), 60.0)
    scheduled = _condition(pod, "PodScheduled", "False")
    if scheduled:
        limit = f"cluster.pending_timeout_minutes: {pending_seconds / 60:g}"
        description = f"cannot be scheduled{_after(_message(scheduled))}; {limit}"
        return Obstacle(Symptom(name, node, rank, ExitCode.UNSCHEDULABLE, description), pending_seconds)
    return None


def is_ready(pod: Object) -> bool:
    """Whether the pod runs on a node that responds."""
    return pod.get("status", {}).get("phase") == "Running" and not _condition(pod, "Ready", "False")


def has_started(pod: Object, container: str) -> bool:
    """Whether the container runs or ran, so that it has a log."""
    state = _state(pod, container)
    return "running" in state or "terminated" in state


def has_ended(pod: Object, container: str) -> bool:
    """Whether the container will not run again."""
    return "terminated" in _state(pod, container) or pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def cause_of(symptoms: Sequence[Symptom]) -> Symptom:
    """The symptom that explains the rest."""
    code = root_cause(symptom.code for symptom in symptoms)
    return min(
        (symptom for symptom in symptoms if symptom.code == code),
        key=lambda symptom: (not symptom.blames_node, symptom.rank),
    )


def blamed_nodes(cause: Symptom, symptoms: Sequence[Symptom]) -> frozenset[str]:
    """The nodes to blame for an ending: the node of its cause, and for two codes the nodes of all suspects. Where
    replicas of the state differ, any suspect may compute wrong. After a health check, all nodes that failed it are
    blamed."""
    shared_codes = (ExitCode.WRONG_ARITHMETIC, ExitCode.UNHEALTHY_NODE)
    suspects = [symptom for symptom in symptoms if symptom.code == cause.code and symptom.code in shared_codes]
    return frozenset(symptom.node for symptom in (cause, *suspects) if symptom.blames_node and symptom.node)


def _condition(pod: Object, kind: str, status: str = "True") -> Object:
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == kind and condition.get("status") == status:
            newest: Object = condition
            return newest
    return {}


def _state(pod: Object, container: str) -> Object:
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if status["name"] == container:
            state: Object = status.get("state") or {}
            return state
    return {}


def _waiting(pod: Object) -> tuple[str, Object]:
    """The first container that waits because of an error. Containers that run before the ranks come first."""
    status = pod.get("status", {})
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting: Object = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE | _CONFIG:
            return container["name"], waiting
    return "", {}


def _failed_before(pod: Object) -> tuple[str, Object] | None:
    """The container that failed before the ranks could start."""
    for container in pod.get("status", {}).get("initContainerStatuses") or []:
        ended_state: Object = (container.get("state") or {}).get("terminated") or {}
        if ended_state.get("exitCode", 0) != 0:
            return container["name"], ended_state
    return None


def _reason_of(condition: Object) -> str:
    return str(condition.get("reason", ""))


def _message(condition: Object) -> str:
    return str(condition.get("message", ""))


def _after(message: str) -> str:
    text = " ".join(message.split())
    return f": {text[:400]}" if text else ""


def _is_bad_node(reason: str) -> bool:
    return reason in _BAD_NODE_REASONS or reason.startswith("OutOf")


def _in_words(code: int) -> str:
    try:
        return f"exit code {code}, {ExitCode(code).name.lower().replace('_', ' ')}"
    except ValueError:
        return f"exit code {code}, signal {code - 128}" if code > 128 else f"exit code {code}"


def classify_message(words: str) -> tuple[ExitCode, str]:
    """The exit code of a job that has waited too long with these words of an event, and the remedy."""
    for word, code, remedy in _REMEDIES:
        if word in words.lower():
            return code, remedy
    return ExitCode.UNSCHEDULABLE, "see kubectl get events"


def explains_missing_pods(event: Object) -> bool:
    """Whether an event of a job or its makers says why pods do not appear."""
    reason = str(event.get("reason", ""))
    if reason == "Unschedulable":  # Volcano reports a full queue as a normal event
        return True
    return event.get("type") == "Warning" and (reason.startswith("Failed") or "schedul" in reason.lower())
