"""A job as a PyTorchJob (kubeflow.org/v1), static or elastic.

The peers of a pod that is restarted alone hang in a collective, so no pod of a static job is. The first failure fails
the job, and the launcher starts the whole gang again as the next launch, which is another PyTorchJob. The nodes of an
elastic job go on without one that is lost, and take in the pod that the operator makes in its place; those of a job
with spares with one of these in its seat, and that pod is the next spare.

All pods are workers. With a master the operator would put a container of its own before the others, which waits for it:
without the rights that a restricted namespace asks for, and not as long as we want.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.emitters.pod import Owner, command, kueue_labels, metadata, pod_template
from holdfast.launch.interface import NODE_RANK_VARIABLE, Job
from holdfast.launch.spares import changes_members, pods_of

LAST_CALL_SECONDS = 10  # for nodes beyond the smallest number to come; later ones are taken in all the same
PORT = 23456  # the one that the operator gives the service of a worker
INDEX_LABEL = "training.kubeflow.org/replica-index"  # the operator's, on every pod


def emit(job: Job, owner: Owner | None = None) -> dict[str, Any]:
    """The PyTorchJob of a launch. With Kueue it is created suspended, and Kueue lets it go.

    The operator makes a headless service for each worker, called as its pod. It calls a static job ended well when all
    workers have, an elastic one when one worker has. A static one failed when one pod has, an elastic one when a pod
    ended with a code that says that it will not pass; its launcher sees to it that the others do not go on forever.
    """
    nodes = job.cluster.nodes
    elastic = changes_members(job.cluster)
    restarts = job.cluster.restarts.budget if elastic else 0
    template = pod_template(job, "pytorch", command(job, *_meeting(job), restarts=restarts))
    (container,) = template["spec"]["containers"]
    field = {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}
    container["env"].append({"name": NODE_RANK_VARIABLE, "valueFrom": {"fieldRef": field}})
    worker = {
        "replicas": pods_of(job.cluster),
        "restartPolicy": "ExitCode" if elastic else "Never",
        "template": template,
    }
    spec: dict[str, Any] = {
        "nprocPerNode": str(job.processes),
        "runPolicy": _run_policy(job),
        "pytorchReplicaSpecs": {"Worker": worker},
    }
    if elastic:
        spec["elasticPolicy"] = {"minReplicas": nodes.min, "maxReplicas": pods_of(job.cluster), "maxRestarts": restarts}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job, owner, kueue_labels(job)),
        "spec": spec,
    }


def _meeting(job: Job) -> list[str]:
    """How the nodes find each other, at worker 0 and within a stated time, in flags: what the operator sets of it in
    variables is less than that."""
    nodes, host = job.cluster.nodes, f"{job.name}-worker-0"
    common = [f"--nproc-per-node={job.processes}"]
    if not changes_members(job.cluster):
        return [
            *common,
            f"--nnodes={nodes.max}",
            f"--node-rank=$({NODE_RANK_VARIABLE})",  # put in by the kubelet
            f"--master-addr={host}",
            f"--master-port={PORT}",
            f"--rdzv-conf=timeout={nodes.rendezvous_seconds}",
        ]
    seconds = nodes.rendezvous_seconds  # also of a read: worker 0 may be the last to start
    last_call = min(LAST_CALL_SECONDS, seconds // 2)  # within the time to join
    spares = f",spares={job.cluster.spares}" if job.cluster.spares else ""
    return [
        *common,
        f"--nnodes={nodes.min}:{nodes.max}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{PORT}",
        f"--rdzv-id={job.run_id}-{job.launch}",  # so that no rank meets a key of a former launch
        f"--rdzv-conf=join_timeout={seconds},last_call_timeout={last_call},read_timeout={seconds}{spares}",
    ]


def _run_policy(job: Job) -> dict[str, Any]:
    """Without a backoffLimit: operators before 1.9.4 delete every pod, with its log, before they say that it is
    reached, and a failed pod that never restarts fails the job anyway."""
    cluster = job.cluster
    policy: dict[str, Any] = {
        "cleanPodPolicy": "Running",  # peers that hang go; those that ended stay, with exit code and log
        "ttlSecondsAfterFinished": int(cluster.ttl_minutes * 60),
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
        }
        policy["schedulingPolicy"] = {key: value for key, value in gang.items() if value is not None}
    return policy
