"""Cleanup of training jobs that an ended DAG left on the cluster: see `orphaned_jobs`.

It raises no expected error. The report of the DAG includes the result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.lease import HeldError
from holdfast.launch.kubernetes.orphaned_jobs import end_orphaned_jobs
from holdfast.launch.kubernetes.owner import find_own_pod
from holdfast.runtime.node import POD_VARIABLE
from holdfast.runtime.secrets import redact
from holdfast.spec import HoldfastError, parse_spec

API_PATIENCE = 20.0  # seconds for retries of a request: the summary matters more than a clean namespace

log = logging.getLogger("holdfast.notify")


def end_jobs_of_run(spec: str, overrides: Sequence[str], run_id: str) -> tuple[list[str], list[str]]:
    """Sentences about the jobs that it ended, and about what remains unknown. Only for the pod of a step."""
    try:
        cluster = parse_spec(spec, overrides).cluster
        home = Api.of_this_process(patience=API_PATIENCE)
        jobs = home.within(cluster.namespace or home.namespace)
        ended_jobs = end_orphaned_jobs(jobs, run_id, cluster.job, find_own_pod(home, os.environ.get(POD_VARIABLE)))
    except HeldError as error:
        log.info("the job of run %s is left to its launcher: %s", run_id, error)
        return [], []
    except HoldfastError as error:
        log.warning("whether run %s left a job is not known: %s", run_id, redact(str(error)))
        return [], [f"whether a job of the run is left: {redact(str(error))}"]
    return [f"job {name} was ended: no launcher followed it any more" for name in ended_jobs], []
