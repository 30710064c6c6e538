"""What a run has left in the namespace of its jobs: a job that no launcher follows any more, and a lease.

A launcher that was killed before it could ask for the deletion of its job leaves it running, and where the job is in
another namespace than the pipeline, no owner's end takes it away. Promises that nothing is ended that a living
launcher follows, of whichever pipeline: whoever ends a job has the run's lease meanwhile. Leaves it to whoever calls
this to know that its own pipeline has ended.
"""

from __future__ import annotations

import logging

from holdfast.launch.emitters import RUN_LABEL
from holdfast.launch.kubernetes.client import LEASES, Api, Object, Resource
from holdfast.launch.kubernetes.kinds import KINDS, Kind
from holdfast.launch.kubernetes.lease import DURATION, RunLease, name_of
from holdfast.launch.kubernetes.owner import OwnPod
from holdfast.spec.errors import MissingError

log = logging.getLogger("holdfast.launch")

PATIENCE = DURATION + 15.0  # seconds: by then the lease of a dead launcher has run out, wherever its pod was


def end_orphaned_jobs(
    api: Api,
    run_id: str,
    job: str,
    pod: OwnPod | None = None,
    *,
    duration: float = DURATION,
    patience: float = PATIENCE,
) -> list[str]:
    """The names of the jobs that were ended: those of the run in the namespace of `api`, of the kind `job`, but for one
    that ended well and is kept for its time. Their pods save a checkpoint and leave.

    `pod` is this process's own. Waits `patience` seconds at most for whoever has the lease, and raises HeldError when
    that one lives.
    """
    kind = KINDS[job]
    if api.get(LEASES, name_of(run_id)) is None and not any(_left(api, kind, run_id)):
        return []
    with RunLease(api, run_id, pod, (), duration, patience) as lease:
        jobs, helpers = _left(api, kind, run_id)
        for resource, found in (*jobs, *helpers):
            lease.check()
            log.info("deleting %s %s: nobody follows it", resource, found["metadata"]["name"])
            api.delete(resource, found["metadata"]["name"], found["metadata"]["uid"])
    return [found["metadata"]["name"] for _, found in jobs]


def _left(api: Api, kind: Kind, run_id: str) -> tuple[list[tuple[Resource, Object]], list[tuple[Resource, Object]]]:
    """The jobs that are to be ended, and what was made beside them."""

    def labelled(resource: Resource) -> list[Object]:
        try:
            return api.list(resource, f"{RUN_LABEL}={run_id}")[0]
        except MissingError:  # the cluster knows no such kind, so there is none
            return []

    kept, jobs = set(), []
    for found in labelled(kind.resource):
        status = kind.status(found)
        if status.state == "succeeded" and status.finished:
            kept.add(found["metadata"]["name"])
        else:
            jobs.append((kind.resource, found))
    return jobs, [
        (resource, found)
        for resource in kind.helpers
        for found in labelled(resource)
        if found["metadata"]["name"] not in kept
    ]
