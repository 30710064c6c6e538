"""A job as a TrainJob of the Kubeflow Trainer (trainer.kubeflow.org/v1alpha1), with the runtime that it refers to.

A TrainJob has few fields for its pods. The rest is in a TrainingRuntime that belongs to the job and has its name.
"""

from typing import Any

from holdfast.launch.emitters.pod import (
    Owner,
    command,
    image,
    kueue_labels,
    metadata,
    pod_template,
    resources,
    volcano_topology,
)
from holdfast.launch.interface import Job

API = "trainer.kubeflow.org/v1alpha1"


def emit(job: Job, owner: Owner | None = None) -> dict[str, Any]:
    """The TrainJob of a launch. With Kueue, it is created suspended, and Kueue releases it.

    It has no time to live: a TrainJob whose JobSet expired would make another one. Its creator deletes it.
    """
    spec: dict[str, Any] = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {
            "image": image(job),
            "command": _argv(job),
            "numNodes": job.cluster.nodes.max,
            "numProcPerNode": job.processes,
            "resourcesPerNode": resources(job),
        },
    }
    if job.cluster.scheduler == "kueue":
        spec["suspend"] = True
    if job.cluster.deadline_hours is not None:
        spec["activeDeadlineSeconds"] = max(1, int(job.cluster.deadline_hours * 3600))
    return {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": metadata(job, owner, kueue_labels(job)),
        "spec": spec,
    }


def emit_runtime(job: Job, owner: Owner | None = None) -> dict[str, Any]:
    """The TrainingRuntime that the TrainJob refers to. It must exist before the TrainJob, and be deleted after it."""
    cluster = job.cluster
    jobs: dict[str, Any] = {
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {
                    "name": "node",
                    "template": {
                        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                        "spec": {"backoffLimit": 0, "template": pod_template(job, "node", _argv(job))},
                    },
                }
            ],
        }
    }
    spec: dict[str, Any] = {"mlPolicy": {"numNodes": cluster.nodes.max, "torch": {}}, "template": jobs}
    if cluster.scheduler == "volcano":
        topology = volcano_topology(job)
        spec["podGroupPolicy"] = {"volcano": {"networkTopology": topology} if topology else {}}
        if cluster.queue:
            jobs["metadata"] = {"annotations": {"scheduling.volcano.sh/queue-name": cluster.queue}}
    framework = {"trainer.kubeflow.org/framework": "torch"}
    return {"apiVersion": API, "kind": "TrainingRuntime", "metadata": metadata(job, owner, framework), "spec": spec}


def _argv(job: Job) -> list[str]:
    return command(job, f"--rdzv-conf=timeout={job.cluster.nodes.rendezvous_seconds}")
