"""What the training of a run that has ended may have left on its cluster, ended from wherever a person is.

The exit handler does the same (`components.notify.leftovers`), where it ran and had the rights.
"""

from __future__ import annotations

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.orphaned_jobs import end_orphaned_jobs
from holdfast.pipelines.backends.interface import CANCELED, FAILED, RunStatus
from holdfast.pipelines.backends.record import Record

CLUSTERS = ("kubeflow", "argo")
API_PATIENCE = 20.0  # seconds that a request is tried


def clean_up_cluster(record: Record, status: RunStatus, api: Api | None = None) -> list[str]:
    """The names of the jobs that were ended, of the kubeconfig's cluster; none where the run has not ended without
    success, or ran on no cluster. Raises HeldError where a launcher follows the run, and what the API server refuses.
    """
    if record.backend not in CLUSTERS or not record.run_id or status.state not in (FAILED, CANCELED):
        return []
    cluster = record.request.spec.cluster
    jobs = (api or Api.of_this_process(patience=API_PATIENCE)).within(
        cluster.namespace or record.namespace or "default"
    )
    return end_orphaned_jobs(jobs, record.identity, cluster.job)
