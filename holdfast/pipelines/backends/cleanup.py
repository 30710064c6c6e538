"""Cleanup of jobs that the training of an ended run left on its cluster, from any machine.

The exit handler does the same (`components.notify.leftovers`) if it ran and had the rights.
"""

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.orphaned_jobs import end_orphaned_jobs
from holdfast.pipelines.backends import capabilities_of
from holdfast.pipelines.backends.interface import CANCELED, FAILED, RunStatus
from holdfast.pipelines.backends.record import Record

API_PATIENCE = 20.0  # seconds of retries for a request


def clean_up_cluster(record: Record, status: RunStatus, api: Api | None = None) -> list[str]:
    """End the leftover jobs of an unsuccessful run on its cluster. Returns their names.

    Does nothing for a run that has succeeded or not ended, or that ran on no cluster. Raises HeldError where a launcher
    follows the run, and the errors of the API server.
    """
    if not capabilities_of(record.backend).kubernetes or not record.run_id or status.state not in (FAILED, CANCELED):
        return []
    cluster = record.request.spec.cluster
    context = record.endpoint if capabilities_of(record.backend).contexts else ""
    jobs = (api or Api.of_this_process(patience=API_PATIENCE, context=context)).within(
        cluster.namespace or record.namespace or "default"
    )
    return end_orphaned_jobs(jobs, record.identity, cluster.job)
