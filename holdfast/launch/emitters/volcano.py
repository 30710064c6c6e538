"""A job as a Volcano Job (batch.volcano.sh/v1alpha1): gang scheduling, network topology, and restarts of the whole
gang.

Unlike a PyTorchJob, it ends or restarts all pods when one of them fails.
"""

from typing import Any

from holdfast.launch.emitters.pod import Owner, command, metadata, pod_template, volcano_topology
from holdfast.launch.interface import Job
from holdfast.spec.errors import ExitCode

PORT = 29500
TASK = "node"


def emit(job: Job, owner: Owner | None = None, restarts: int = 0) -> dict[str, Any]:
    """The Volcano Job of a launch.

    `restarts`: how often Volcano itself restarts the gang. Zero if a launcher follows the job and starts the next one.
    A job without a launcher takes the spec's budget. The gang that forms after a restart claims a new attempt.
    """
    cluster = job.cluster
    argv = command(
        job,
        f"--nnodes={cluster.nodes.max}",
        f"--nproc-per-node={job.processes}",
        "--node-rank=$(VC_TASK_INDEX)",  # set by the plugin env, expanded by the kubelet
        f"--master-addr={job.name}-{TASK}-0.{job.name}",  # made by the plugin svc
        f"--master-port={PORT}",
        f"--rdzv-conf=timeout={cluster.nodes.rendezvous_seconds}",
    )
    template = pod_template(job, "train", argv)
    policy = {"prefer": "best-effort", "require": "single-numa-node"}.get(cluster.topology.numa)
    numa = {"topologyPolicy": policy} if policy else {}
    if cluster.deadline_hours is not None:
        template["spec"]["activeDeadlineSeconds"] = max(1, int(cluster.deadline_hours * 3600))
    optional = {
        "queue": cluster.queue,
        "priorityClassName": cluster.priority_class,
        "networkTopology": volcano_topology(job),
    }
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": metadata(job, owner),
        "spec": {
            "schedulerName": "volcano",
            "minAvailable": cluster.nodes.max,
            "maxRetry": max(1, restarts),
            "ttlSecondsAfterFinished": int(cluster.ttl_minutes * 60),
            "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
            "policies": _policies(restarts, f"{max(1, int(cluster.pending_timeout_minutes * 60))}s"),
            "tasks": [{"name": TASK, "replicas": cluster.nodes.max, "template": template, **numa}],
            **{key: value for key, value in optional.items() if value is not None},
        },
    }


def _policies(restarts: int, pending: str) -> list[dict[str, Any]]:
    """Volcano's policies for a failed or pending pod; the first match counts."""
    on_pending = {"event": "PodPending", "action": "TerminateJob", "timeout": pending}
    if not restarts:
        return [{"events": ["PodFailed", "PodEvicted"], "action": "TerminateJob"}, on_pending]
    permanent = [
        {"exitCode": int(code), "action": "TerminateJob"}
        for code in ExitCode
        if code is not ExitCode.OK and not code.retryable
    ]
    return [*permanent, {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"}, on_pending]
