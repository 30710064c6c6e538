"""A job as a PyTorchJob (kubeflow.org/v1), static or elastic.

In a static job, no pod restarts alone, because its peers would hang in a collective. The first failure fails the job,
and the launcher starts the whole gang as the next launch, which is another PyTorchJob.

The nodes of an elastic job continue without a lost node, and admit the pod that the operator makes in its place. In a
job with spares, a spare takes the lost node's slot, and the new pod is the next spare.

All pods are workers. With a master, the operator would add an init container that waits for it. That container lacks
the security context that a restricted namespace requires, and has the wrong timeout.
"""

from typing import Any

from holdfast.launch.emitters.pod import Owner, command, kueue_labels, metadata, pod_template
from holdfast.launch.interface import NODE_RANK_VARIABLE, Job, changes_members, pods_of

LAST_CALL_SECONDS = 10  # to wait for nodes beyond the minimum; later ones still join
PORT = 23456  # port of the operator's service of a worker
INDEX_LABEL = "training.kubeflow.org/replica-index"  # set by the operator on every pod


def emit(job: Job, owner: Owner | None = None) -> dict[str, Any]:
    """The PyTorchJob of a launch. With Kueue, it is created suspended, and Kueue releases it.

    The operator makes a headless service for each worker, with the name of its pod. Its states are:

    - A static job succeeds when all workers have succeeded, an elastic one when one worker has.
    - A static job fails when one pod has failed, an elastic one when a pod ended with a permanent code. Its launcher
      then ensures that the other pods end.
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
    """The torchrun flags by which the nodes meet at worker 0, within a time limit. The variables that the operator sets
    are not enough."""
    nodes, host = job.cluster.nodes, f"{job.name}-worker-0"
    common = [f"--nproc-per-node={job.processes}"]
    if not changes_members(job.cluster):
        return [
            *common,
            f"--nnodes={nodes.max}",
            f"--node-rank=$({NODE_RANK_VARIABLE})",  # expanded by the kubelet
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
        f"--rdzv-id={job.run_id}-{job.launch}",  # so that no rank sees a key of an earlier launch
        f"--rdzv-conf=join_timeout={seconds},last_call_timeout={last_call},read_timeout={seconds}{spares}",
    ]


def _run_policy(job: Job) -> dict[str, Any]:
    """The run policy, without a backoffLimit. Operators before 1.9.4 delete every pod, with its log, before they report
    that limit. A failed pod that never restarts fails the job anyway."""
    cluster = job.cluster
    policy: dict[str, Any] = {
        "cleanPodPolicy": "Running",  # ends hanging peers; keeps pods that have ended, with exit code and log
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
