"""Kinds of job objects that the launcher can follow: their API resources, and how to read their state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.launch.kubernetes.client import Object, Resource

State = Literal["waiting", "suspended", "running", "succeeded", "failed"]


@dataclass(frozen=True)
class Status:
    """The state that a job object reports."""

    state: State
    reason: str = ""
    message: str = ""
    finished: bool = False  # its time to live has started, so its controller will delete it


@dataclass(frozen=True)
class Kind:
    """One kind of job object."""

    resource: Resource
    helpers: tuple[Resource, ...]  # objects that the emitter creates with it, under the same name
    container: str  # name of the pod's container that trains
    rank: Callable[[Object], int]  # number of a pod's node in the job
    status: Callable[[Object], Status]
    remedy: str  # if the cluster does not know this kind
    label: str  # key of a label of every pod, which the controllers set after those of the template
    # The names of the objects that create or admit the pods of a job, by the job's name and uid.
    makers: Callable[[str, str], tuple[str, ...]] = lambda name, uid: (name,)  # noqa: ARG005


def is_held(job: Object) -> bool:
    """Whether a queue holds the job. Its operator may not have noticed yet."""
    spec = job["spec"]
    return bool(spec.get("runPolicy", spec).get("suspend"))


def _true_conditions(job: Object) -> dict[str, Object]:
    """The true conditions by type, without order: operators reorder them as they change."""
    conditions = job.get("status", {}).get("conditions") or []
    return {condition["type"]: condition for condition in conditions if condition.get("status") == "True"}


def _from_conditions(job: Object, words: Mapping[str, State], finished: bool) -> Status:
    """The state of the first of `words` that is true: an ending is final, even if other conditions are true."""
    conditions = _true_conditions(job)
    for word, state in words.items():
        if word in conditions:
            return Status(state, conditions[word].get("reason", ""), conditions[word].get("message", ""), finished)
    return Status("waiting")


def _pytorchjob(job: Object) -> Status:
    states: dict[str, State] = {
        "Failed": "failed",
        "Succeeded": "succeeded",
        "Suspended": "suspended",
        "Running": "running",
    }
    if is_held(job) and not {"Failed", "Succeeded"} & _true_conditions(job).keys():
        return Status("suspended")  # the condition comes later
    finished = (
        bool(job.get("status", {}).get("completionTime")) and "ttlSecondsAfterFinished" in job["spec"]["runPolicy"]
    )
    return _from_conditions(job, states, finished=finished)


def _trainjob(job: Object) -> Status:
    states: dict[str, State] = {"Failed": "failed", "Complete": "succeeded", "Suspended": "suspended"}
    if is_held(job) and not {"Failed", "Complete"} & _true_conditions(job).keys():
        return Status("suspended")
    return _from_conditions(job, states, finished=False)  # its emitter gives it no time to live


def _volcano(job: Object) -> Status:
    state = job.get("status", {}).get("state", {})
    states: dict[str, State] = {
        "Running": "running",
        "Completing": "running",
        "Completed": "succeeded",
        **dict.fromkeys(("Aborting", "Aborted", "Terminating", "Terminated", "Failed"), "failed"),
    }
    phase = state.get("phase", "Pending")
    has_ended = phase in ("Completed", "Terminated", "Failed")
    finished = has_ended and "ttlSecondsAfterFinished" in job["spec"]
    return Status(states.get(phase, "waiting"), state.get("reason", ""), state.get("message", ""), finished)


def _pytorchjob_rank(pod: Object) -> int:
    return int(pod["metadata"].get("labels", {}).get("training.kubeflow.org/replica-index", 0))


def _trainjob_rank(pod: Object) -> int:
    metadata = pod["metadata"]
    key = "batch.kubernetes.io/job-completion-index"
    return int(metadata.get("labels", {}).get(key) or metadata.get("annotations", {}).get(key) or 0)


def _volcano_rank(pod: Object) -> int:
    metadata = pod["metadata"]
    key = "volcano.sh/task-index"
    return int(metadata.get("labels", {}).get(key) or metadata.get("annotations", {}).get(key) or 0)


KINDS: Mapping[str, Kind] = {
    "pytorchjob": Kind(
        Resource("kubeflow.org", "v1", "pytorchjobs"),
        (),
        "pytorch",
        _pytorchjob_rank,
        _pytorchjob,
        "install the Kubeflow training operator, or use another cluster.job",
        "training.kubeflow.org/job-name",
    ),
    "trainjob": Kind(
        Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
        (Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),),
        "node",
        _trainjob_rank,
        _trainjob,
        "install the Kubeflow trainer, or use another cluster.job",
        "jobset.sigs.k8s.io/jobset-name",
        lambda name, uid: (name, f"{name}-node-0"),  # noqa: ARG005 - a JobSet, and the Job in it
    ),
    "volcano": Kind(
        Resource("batch.volcano.sh", "v1alpha1", "jobs"),
        (),
        "train",
        _volcano_rank,
        _volcano,
        "install Volcano, or use another cluster.job",
        "volcano.sh/job-name",
        lambda name, uid: (name, f"{name}-{uid}"),  # its PodGroup, which must be admitted before pods exist
    ),
}
