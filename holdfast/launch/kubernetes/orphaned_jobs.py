"""Removal of what a run left in the namespace of its jobs: a job that no launcher follows, and a lease.

A launcher that is killed before it deletes its job leaves the job running. If the job is in another namespace than the
pipeline, no owner reference removes it. A job that a living launcher follows is never ended, whichever pipeline that
launcher belongs to: the run's lease is held meanwhile. Callers must know that their own pipeline has ended.
"""

import logging
import os
from collections.abc import Sequence

from holdfast.launch.emitters import RUN_LABEL
from holdfast.launch.kubernetes.client import LEASES, Api, Object, Resource
from holdfast.launch.kubernetes.kinds import KINDS, Kind
from holdfast.launch.kubernetes.lease import DURATION, HeldError, RunLease, name_of
from holdfast.launch.kubernetes.owner import OwnPod, find_own_pod
from holdfast.runtime.node import POD_VARIABLE
from holdfast.runtime.secrets import redact
from holdfast.spec import parse_spec
from holdfast.spec.errors import HoldfastError, MissingError

log = logging.getLogger("holdfast.launch")
notify_log = logging.getLogger("holdfast.notify")  # of the step that calls `end_jobs_of_run`

PATIENCE = DURATION + 15.0  # seconds: a dead launcher's lease has expired by then, wherever its pod was
API_PATIENCE = 20.0  # seconds for retries of a request: the summary matters more than a clean namespace


def end_orphaned_jobs(
    api: Api,
    run_id: str,
    job: str,
    pod: OwnPod | None = None,
    *,
    duration: float = DURATION,
    patience: float = PATIENCE,
) -> list[str]:
    """End the run's jobs of kind `job` in the namespace of `api`, and return their names. Their pods save a checkpoint
    and leave. A job that succeeded and is kept for its time to live stays.

    `pod` is this process's own. Waits at most `patience` seconds for the lease, and raises HeldError if its holder
    lives.
    """
    kind = KINDS[job]
    if api.get(LEASES, name_of(run_id)) is None and not any(_left(api, kind, run_id)):
        return []
    with RunLease(api, run_id, pod, (), duration, patience) as lease:
        jobs, helpers = _left(api, kind, run_id)
        for resource, obj in (*jobs, *helpers):
            lease.check()
            log.info("deleting %s %s: no launcher follows it", resource, obj["metadata"]["name"])
            api.delete(resource, obj["metadata"]["name"], obj["metadata"]["uid"])
    return [obj["metadata"]["name"] for _, obj in jobs]


def _left(api: Api, kind: Kind, run_id: str) -> tuple[list[tuple[Resource, Object]], list[tuple[Resource, Object]]]:
    """The jobs to end, and the objects that were created with them."""

    def labelled(resource: Resource) -> list[Object]:
        try:
            return api.list(resource, f"{RUN_LABEL}={run_id}")[0]
        except MissingError:  # the cluster does not know this kind, so it has none
            return []

    kept_names, jobs = set(), []
    for obj in labelled(kind.resource):
        status = kind.status(obj)
        if status.state == "succeeded" and status.finished:
            kept_names.add(obj["metadata"]["name"])
        else:
            jobs.append((kind.resource, obj))
    return jobs, [
        (resource, obj)
        for resource in kind.helpers
        for obj in labelled(resource)
        if obj["metadata"]["name"] not in kept_names
    ]


def end_jobs_of_run(spec: str, overrides: Sequence[str], run_id: str) -> tuple[list[str], list[str]]:
    """Sentences about the jobs that it ended, and about what remains unknown. Only for the pod of a step."""
    try:
        cluster = parse_spec(spec, overrides).cluster
        home = Api.of_this_process(patience=API_PATIENCE)
        jobs = home.within(cluster.namespace or home.namespace)
        ended_jobs = end_orphaned_jobs(jobs, run_id, cluster.job, find_own_pod(home, os.environ.get(POD_VARIABLE)))
    except HeldError as error:
        notify_log.info("the job of run %s is left to its launcher: %s", run_id, error)
        return [], []
    except HoldfastError as error:
        notify_log.warning("whether run %s left a job is not known: %s", run_id, redact(str(error)))
        return [], [f"whether a job of the run is left: {redact(str(error))}"]
    return [f"job {name} was ended: no launcher followed it any more" for name in ended_jobs], []
