"""The training operator's behavior for PyTorchJobs, as its docs and source describe it, and the garbage collector's."""

import copy
import time
import uuid
from datetime import UTC, datetime

from tests.cluster.objects import Object, Objects, StatusError, now
from tests.cluster.remote import ServerObjects
from tests.ports import free_port

# The init container that the operator (1.9.0) adds to a worker when the job has a master: it resolves the master's
# name, up to a hundred times, and has no securityContext.
INIT_CONTAINER: Object = {
    "name": "init-pytorch",
    "image": "alpine:3.10",
    "imagePullPolicy": "IfNotPresent",
    "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
    "command": ["sh", "-c", "for i in $(seq 100); do nslookup {master} && exit 0; sleep 2; done; exit 1"],
}
KINDS = ("pytorchjobs", "pods", "leases", "workflows", "trainjobs", "jobs", "trainingruntimes", "configmaps", "secrets")


class Operator:
    """Creates pods of jobs, reports their state in conditions, and cleans up."""

    def __init__(self, objects: Objects | ServerObjects) -> None:
        self._objects = objects
        self._ports: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._refused: dict[str, tuple[int, float]] = {}  # by job: number of refusals, and time of the next try
        self._event_names: dict[tuple[str, str], str] = {}  # the names of events

    def reconcile(self) -> None:
        """Bring every PyTorchJob and its pods closer to the desired state."""
        for job in self._objects.all("pytorchjobs"):
            pods = [pod for pod in self._objects.all("pods") if _owned(pod, job)]
            if "deletionTimestamp" in job["metadata"]:
                continue
            end_conditions = _conditions(job) & {"Failed", "Succeeded"}
            if end_conditions:
                self._clean(job, pods)
            elif job["spec"]["runPolicy"].get("suspend"):
                self._condition(job, "Suspended", "PyTorchJobSuspended", "suspended")
                for pod in pods:
                    self._delete(pod)
            else:
                self._advance(job, pods)

    def collect(self) -> None:
        """Complete foreground deletions, and delete objects that have lost their owner."""
        everything = [(plural, manifest) for plural in KINDS for manifest in self._objects.all(plural)]
        for plural, body in everything:
            metadata = body["metadata"]
            dependents = [(kind, other) for kind, other in everything if _owned(other, body)]
            if plural != "pods" and "deletionTimestamp" in metadata:
                for kind, other in dependents:
                    self._delete(other, kind)
                if not dependents:
                    self._objects.remove(plural, metadata["name"], metadata["namespace"])
            owners = metadata.get("ownerReferences") or []
            if owners and not any(self._objects.knows(owner, metadata["namespace"]) for owner in owners):
                self._delete(body, plural)

    def _advance(self, job: Object, pods: list[Object]) -> None:
        uid, name = job["metadata"]["uid"], job["metadata"]["name"]
        self._condition(job, "Created", "PyTorchJobCreated", f"PyTorchJob {name} is created.")
        self._started.setdefault(uid, time.monotonic())
        deadline = job["spec"]["runPolicy"].get("activeDeadlineSeconds")
        if deadline is not None and time.monotonic() - self._started[uid] > deadline:
            message = f"PyTorchJob {name} has failed because it was active longer than specified deadline"
            self._condition(job, "Failed", "PyTorchJobFailed", message, complete=True)
            return
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        running = succeeded = 0
        for role, index, replica in _replicas(job):
            pod = by_name.get(f"{name}-{role}-{index}")
            if pod is None:
                self._make(job, role, index, replica)
                continue
            phase = pod.get("status", {}).get("phase")
            running += phase == "Running"
            if phase == "Failed" and "deletionTimestamp" not in pod["metadata"]:
                self._failed(job, pod, role, replica)
                return
            succeeded += phase == "Succeeded"
            if (role == "master" and phase == "Succeeded") or (succeeded and _has_come(job, succeeded)):
                message = f"PyTorchJob {name} is successfully completed."
                self._condition(job, "Succeeded", "PyTorchJobSucceeded", message, complete=True)
                return
        if "Suspended" in _conditions(job):  # reported after the pods were created
            self._objects.change("pytorchjobs", name, _resume, uid, job["metadata"]["namespace"])
        if running:
            self._condition(job, "Running", "PyTorchJobRunning", f"PyTorchJob {name} is running.")

    def _failed(self, job: Object, pod: Object, role: str, replica: Object) -> None:
        states = pod["status"].get("containerStatuses") or []
        codes = [entry["state"]["terminated"]["exitCode"] for entry in states if "terminated" in entry["state"]]
        name = job["metadata"]["name"]
        by_code = replica["restartPolicy"] == "ExitCode"
        if by_code and (not codes or max(codes) >= 128):
            self._condition(job, "Restarting", "PyTorchJobRestarting", f"{name} is restarting because {role} failed.")
            self._delete(pod)
            return
        message = f"PyTorchJob {name} is failing because 1 {role.capitalize()} replica(s) failed."
        self._condition(job, "Failed", "PyTorchJobFailed", message, complete=not by_code)

    def _clean(self, job: Object, pods: list[Object]) -> None:
        policy = job["spec"]["runPolicy"]
        clean = policy.get("cleanPodPolicy", "None")
        for pod in pods:
            if clean == "All" or (clean == "Running" and pod.get("status", {}).get("phase") in ("Running", "Pending")):
                self._delete(pod)
        completed, keep = job["status"].get("completionTime"), policy.get("ttlSecondsAfterFinished")
        if completed is not None and keep is not None:
            age = datetime.now(UTC) - datetime.fromisoformat(completed)
            if age.total_seconds() >= keep:
                self._delete(job, "pytorchjobs")

    def _make(self, job: Object, role: str, index: int, replica: Object) -> None:
        tries, next_try = self._refused.get(job["metadata"]["uid"], (0, 0.0))
        if time.monotonic() < next_try:
            return
        try:
            self._objects.create("pods", self._pod(job, role, index, replica))
            self._refused.pop(job["metadata"]["uid"], None)
        except StatusError as error:
            self._refused[job["metadata"]["uid"]] = (tries + 1, time.monotonic() + min(30.0, 0.05 * 2**tries))
            if error.code != 409:
                self._event(job, "Warning", "FailedCreatePod", f"Error creating: {error}")

    def _event(self, job: Object, kind: str, reason: str, message: str) -> None:
        """Emit an event about a job; the same message again only raises the count."""
        metadata, stamp = job["metadata"], now()
        event_name = self._event_names.get((metadata["uid"], message))
        if event_name is not None:

            def again(found: Object) -> None:
                found.update(count=found["count"] + 1, lastTimestamp=stamp)

            self._objects.change("events", event_name, again, namespace=metadata["namespace"])
            return
        reference = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": metadata["name"]}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {**reference, "namespace": metadata["namespace"], "uid": metadata["uid"]},
            "type": kind, "reason": reason, "message": message, "count": 1,
            "firstTimestamp": stamp, "lastTimestamp": stamp, "source": {"component": "pytorchjob-controller"},
        }  # fmt: skip
        self._event_names[metadata["uid"], message] = self._objects.create("events", event)["metadata"]["name"]

    def _pod(self, job: Object, role: str, index: int, replica: Object) -> Object:
        metadata, spec = job["metadata"], copy.deepcopy(replica["template"]["spec"])
        template = replica["template"].get("metadata", {})
        replicas = job["spec"]["pytorchReplicaSpecs"]
        nodes = sum(entry["replicas"] for entry in replicas.values())
        processes = job["spec"].get("nprocPerNode", "1")
        port = self._ports.setdefault(metadata["uid"], free_port())
        variables = {"PET_NPROC_PER_NODE": processes, "PYTHONUNBUFFERED": "1"}
        address = f"127.0.0.1:{port}"
        if elastic := job["spec"].get("elasticPolicy"):
            variables |= {
                "PET_RDZV_ENDPOINT": address, "PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d"),
                "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
                "PET_MAX_RESTARTS": str(elastic.get("maxRestarts", 0)),
            }  # fmt: skip
        else:
            variables |= {"PET_NNODES": str(nodes)}
        if "Master" in replicas:
            rank = index if role == "master" else index + 1
            variables |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nodes), "RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NODE_RANK": str(rank),
            }  # fmt: skip
        if role == "worker" and "Master" in replicas:
            waiting = copy.deepcopy(INIT_CONTAINER)
            waiting["command"][2] = waiting["command"][2].format(master=f"{metadata['name']}-master-0")
            spec.setdefault("initContainers", []).append(waiting)
        container = next(entry for entry in spec["containers"] if entry["name"] == "pytorch")
        # the name service: pods are processes of one machine, and each job has a separate port
        here = {f"{metadata['name']}-worker-0:23456": address, f"{metadata['name']}-worker-0": "127.0.0.1"}
        here["--master-port=23456"] = f"--master-port={port}"
        for name, instead in here.items():
            container["command"] = [argument.replace(name, instead) for argument in container["command"]]
        container.setdefault("env", []).extend({"name": key, "value": value} for key, value in variables.items())
        labels = {
            **template.get("labels", {}),
            "training.kubeflow.org/job-name": metadata["name"],
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            "training.kubeflow.org/replica-type": role,
            "training.kubeflow.org/replica-index": str(index),
        }
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": metadata["name"], "controller": True}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{metadata['name']}-{role}-{index}",
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": template.get("annotations", {}),
                "ownerReferences": [{**owner, "uid": metadata["uid"], "blockOwnerDeletion": True}],
            },
            "spec": {**spec, "restartPolicy": "Never"},
            "status": {"phase": "Pending"},
        }

    def _condition(self, job: Object, kind: str, reason: str, message: str, complete: bool = False) -> None:
        """Set a condition to true and move it to the end. An ending replaces Running. Failed is permanent."""

        def edit(found: Object) -> None:
            status = found.setdefault("status", {})
            conditions = status.setdefault("conditions", [])
            if kind in _conditions(found) or "Failed" in _conditions(found):
                return
            for condition in conditions:
                if condition["type"] in ("Running", "Restarting") and kind != "Created":
                    condition["status"] = "False"
            conditions[:] = [condition for condition in conditions if condition["type"] != kind]
            conditions.append({"type": kind, "status": "True", "reason": reason, "message": message,
                               "lastTransitionTime": now()})  # fmt: skip
            if complete:
                status["completionTime"] = now()

        self._objects.change(
            "pytorchjobs", job["metadata"]["name"], edit, job["metadata"]["uid"], job["metadata"]["namespace"]
        )

    def _delete(self, found: Object, plural: str = "pods") -> None:
        metadata = found["metadata"]
        try:
            self._objects.delete(
                plural, metadata["name"], metadata["uid"], plural == "pytorchjobs", metadata["namespace"]
            )
        except StatusError:
            return


def _resume(job: Object) -> None:
    for condition in job["status"]["conditions"]:
        if condition["type"] == "Suspended":
            condition["status"] = "False"


def _owned(found: Object, owner: Object) -> bool:
    uid = owner["metadata"]["uid"]
    return any(reference["uid"] == uid for reference in found["metadata"].get("ownerReferences") or [])


def _conditions(job: Object) -> set[str]:
    conditions = job.get("status", {}).get("conditions") or []
    return {condition["type"] for condition in conditions if condition["status"] == "True"}


def _has_come(job: Object, succeeded: int) -> bool:
    """Whether these workers are enough where the job has no master."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    return "Master" not in replicas and ("elasticPolicy" in job["spec"] or succeeded == replicas["Worker"]["replicas"])


def _replicas(job: Object) -> list[tuple[str, int, Object]]:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    return [
        (role.lower(), index, replica) for role, replica in replicas.items() for index in range(replica["replicas"])
    ]
