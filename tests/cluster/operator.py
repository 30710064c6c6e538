"""The training operator's behaviour for PyTorchJobs, as docs and source say it, and the garbage collector's."""

from __future__ import annotations

import copy
import socket
import time
from datetime import UTC, datetime

from tests.cluster.api import Object, Objects, StatusError, now


class Operator:
    """Makes pods of jobs, tells in conditions how they do, and cleans up."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._ports: dict[str, int] = {}
        self._started: dict[str, float] = {}

    def reconcile(self) -> None:
        """Bring every PyTorchJob and its pods nearer to what they should be."""
        for job in self._objects.all("pytorchjobs"):
            pods = [pod for pod in self._objects.all("pods") if _owned(pod, job)]
            if "deletionTimestamp" in job["metadata"]:
                continue
            ended = _conditions(job) & {"Failed", "Succeeded"}
            if ended:
                self._clean(job, pods)
            elif job["spec"]["runPolicy"].get("suspend"):
                self._condition(job, "Suspended", "PyTorchJobSuspended", "suspended")
                for pod in pods:
                    self._delete(pod)
            else:
                self._go_on(job, pods)

    def collect(self) -> None:
        """Foreground deletion, and what has lost its owner."""
        everything = [(plural, found) for plural in ("pytorchjobs", "pods", "leases", "workflows", "trainjobs", "jobs",
                      "trainingruntimes") for found in self._objects.all(plural)]  # fmt: skip
        uids = {found["metadata"]["uid"] for _, found in everything}
        for plural, found in everything:
            name, metadata = found["metadata"]["name"], found["metadata"]
            dependents = [(kind, other) for kind, other in everything if _owned(other, found)]
            if plural != "pods" and "deletionTimestamp" in metadata:
                for kind, other in dependents:
                    self._delete(other, kind)
                if not dependents:
                    self._objects.remove(plural, name)
            owners = metadata.get("ownerReferences") or []
            if owners and not any(owner["uid"] in uids for owner in owners):
                self._delete(found, plural)

    def _go_on(self, job: Object, pods: list[Object]) -> None:
        uid, name = job["metadata"]["uid"], job["metadata"]["name"]
        self._condition(job, "Created", "PyTorchJobCreated", f"PyTorchJob {name} is created.")
        self._started.setdefault(uid, time.monotonic())
        deadline = job["spec"]["runPolicy"].get("activeDeadlineSeconds")
        if deadline is not None and time.monotonic() - self._started[uid] > deadline:
            message = f"PyTorchJob {name} has failed because it was active longer than specified deadline"
            self._condition(job, "Failed", "PyTorchJobFailed", message, complete=True)
            return
        there = {pod["metadata"]["name"]: pod for pod in pods}
        running = 0
        for role, index, replica in _replicas(job):
            pod = there.get(f"{name}-{role}-{index}")
            if pod is None:
                self._make(job, role, index, replica)
                continue
            phase = pod.get("status", {}).get("phase")
            running += phase == "Running"
            if phase == "Failed" and "deletionTimestamp" not in pod["metadata"]:
                self._failed(job, pod, role, replica)
                return
            if phase == "Succeeded" and (role == "master" or "Master" not in job["spec"]["pytorchReplicaSpecs"]):
                message = f"PyTorchJob {name} is successfully completed."
                self._condition(job, "Succeeded", "PyTorchJobSucceeded", message, complete=True)
                return
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
        done, keep = job["status"].get("completionTime"), policy.get("ttlSecondsAfterFinished")
        if done is not None and keep is not None:
            age = datetime.now(UTC) - datetime.fromisoformat(done)
            if age.total_seconds() >= keep:
                self._delete(job, "pytorchjobs")

    def _make(self, job: Object, role: str, index: int, replica: Object) -> None:
        metadata, spec = job["metadata"], copy.deepcopy(replica["template"]["spec"])
        template = replica["template"].get("metadata", {})
        replicas = job["spec"]["pytorchReplicaSpecs"]
        nodes = sum(entry["replicas"] for entry in replicas.values())
        processes = job["spec"].get("nprocPerNode", "1")
        port = self._ports.setdefault(metadata["uid"], _free_port())
        variables = {"PET_NPROC_PER_NODE": processes, "PYTHONUNBUFFERED": "1"}
        if elastic := job["spec"].get("elasticPolicy"):
            variables |= {
                "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_RDZV_BACKEND": elastic.get("rdzvBackend", "c10d"),
                "PET_RDZV_ID": metadata["name"], "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
                "PET_MAX_RESTARTS": str(elastic.get("maxRestarts", 0)),
            }  # fmt: skip
        else:
            rank = index if role == "master" else index + 1
            variables |= {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nodes), "RANK": str(rank),
                "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PET_NODE_RANK": str(rank),
                "PET_NNODES": str(nodes),
            }  # fmt: skip
        container = next(entry for entry in spec["containers"] if entry["name"] == "pytorch")
        container.setdefault("env", []).extend({"name": key, "value": value} for key, value in variables.items())
        labels = {
            **template.get("labels", {}),
            "training.kubeflow.org/job-name": metadata["name"],
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
            "training.kubeflow.org/replica-type": role,
            "training.kubeflow.org/replica-index": str(index),
        }
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": metadata["name"], "controller": True}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{metadata['name']}-{role}-{index}",
                "labels": labels,
                "ownerReferences": [{**owner, "uid": metadata["uid"], "blockOwnerDeletion": True}],
            },
            "spec": {**spec, "restartPolicy": "Never"},
            "status": {"phase": "Pending"},
        }
        self._objects.create("pods", pod)

    def _condition(self, job: Object, kind: str, reason: str, message: str, complete: bool = False) -> None:
        """Make a condition true: it goes to the end, and Running gives way to an ending. Failed is sticky."""

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

        self._objects.change("pytorchjobs", job["metadata"]["name"], edit, job["metadata"]["uid"])

    def _delete(self, found: Object, plural: str = "pods") -> None:
        try:
            self._objects.delete(plural, found["metadata"]["name"], found["metadata"]["uid"], plural == "pytorchjobs")
        except StatusError:
            return


def _owned(found: Object, owner: Object) -> bool:
    uid = owner["metadata"]["uid"]
    return any(reference["uid"] == uid for reference in found["metadata"].get("ownerReferences") or [])


def _conditions(job: Object) -> set[str]:
    conditions = job.get("status", {}).get("conditions") or []
    return {condition["type"] for condition in conditions if condition["status"] == "True"}


def _replicas(job: Object) -> list[tuple[str, int, Object]]:
    replicas = job["spec"]["pytorchReplicaSpecs"]
    return [
        (role.lower(), index, replica) for role, replica in replicas.items() for index in range(replica["replicas"])
    ]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
