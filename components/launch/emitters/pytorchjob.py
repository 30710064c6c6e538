"""A job as a PyTorchJob (kubeflow.org/v1), static or elastic.

The operator restarts single pods, whose peers then hang in a collective; here no pod is ever restarted. The first
failure fails the job, and the launcher starts the whole gang again as the next launch, which is another PyTorchJob.
"""

from __future__ import annotations

from typing import Any

from holdfast.components.launch.emitters.pod import Owner, command, kueue_labels, metadata, pod_template
from holdfast.components.launch.interface import Job

LAST_CALL_SECONDS = 30  # for nodes beyond the smallest number to come


def emit(job: Job, owner: Owner | None = None) -> dict[str, Any]:
    """The PyTorchJob of a launch. With Kueue it is created suspended, and Kueue lets it go."""
    nodes = job.cluster.nodes
    spec: dict[str, Any] = {
        "nprocPerNode": str(job.processes),
        "runPolicy": _run_policy(job),
        "pytorchReplicaSpecs": _elastic(job) if nodes.min < nodes.max else _static(job),
    }
    if nodes.min < nodes.max:
        spec["elasticPolicy"] = {
            "minReplicas": nodes.min,
            "maxReplicas": nodes.max,
            "maxRestarts": 0,
            "rdzvBackend": "c10d",
            "rdzvId": f"{job.run_id}-{job.launch}",  # so that no rank meets a key of a former launch
            "rdzvConf": [
                {"key": "join_timeout", "value": str(nodes.rendezvous_seconds)},
                {"key": "last_call_timeout", "value": str(LAST_CALL_SECONDS)},
                {"key": "read_timeout", "value": str(nodes.rendezvous_seconds)},  # worker 0 may be the last to start
            ],
        }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job, owner, kueue_labels(job)),
        "spec": spec,
    }


def _static(job: Job) -> dict[str, Any]:
    """A master, which is node 0, and the workers: the master's success is the job's."""
    workers = job.cluster.nodes.max - 1
    argv = command(job, f"--rdzv-conf=timeout={job.cluster.nodes.rendezvous_seconds}")

    def replicas(count: int) -> dict[str, Any]:
        template = pod_template(job, "pytorch", argv, group=workers > 0)
        return {"replicas": count, "restartPolicy": "Never", "template": template}

    return {"Master": replicas(1)} | ({"Worker": replicas(workers)} if workers else {})


def _elastic(job: Job) -> dict[str, Any]:
    """Workers only: they find each other through the rendezvous that worker 0 hosts."""
    template = pod_template(job, "pytorch", command(job))
    return {"Worker": {"replicas": job.cluster.nodes.max, "restartPolicy": "Never", "template": template}}


def _run_policy(job: Job) -> dict[str, Any]:
    cluster = job.cluster
    policy: dict[str, Any] = {
        "backoffLimit": 0,
        "cleanPodPolicy": "Running",  # peers that hang go; those that ended stay, with exit code and log
        "ttlSecondsAfterFinished": int(cluster.keep_minutes * 60),
    }
    if cluster.deadline_hours is not None:
        policy["activeDeadlineSeconds"] = max(1, int(cluster.deadline_hours * 3600))
    if cluster.scheduler == "kueue":
        policy["suspend"] = True
    if cluster.scheduler == "volcano":
        gang = {
            "minAvailable": cluster.nodes.min,
            "queue": cluster.queue,
            "priorityClass": cluster.priority_class,
            "scheduleTimeoutSeconds": max(1, int(cluster.pending_minutes * 60)),
        }
        policy["schedulingPolicy"] = {key: value for key, value in gang.items() if value is not None}
    return policy
