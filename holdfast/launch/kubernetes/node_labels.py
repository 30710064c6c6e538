"""Labels on cluster nodes that failed a health check, for schedulers and later jobs.

Server-side apply sets a label, and an annotation with the run and the time, and touches nothing else of the node. It
never raises: a label that may not be set becomes a warning with the remedy.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from holdfast.launch.emitters.pod import FAILED, HEALTH_LABEL
from holdfast.launch.interface import GangExit, Job
from holdfast.launch.kubernetes.client import NODES, Api
from holdfast.spec.errors import HoldfastError

log = logging.getLogger("holdfast.launch")

MANAGER = "holdfast-health"  # field manager of the label
FOUND_BY = "holdfast/health-found-by"  # the annotation
PATIENCE = 30.0  # seconds for each node, while the restart of the gang waits


def label_unhealthy(api: Api, job: Job, ending: GangExit) -> None:
    """Label the nodes that failed the health check which ended a launch."""
    patient = api.within(api.namespace, PATIENCE)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for name in sorted(ending.blamed_nodes):
        metadata = {
            "name": name,
            "labels": {HEALTH_LABEL: FAILED},
            "annotations": {FOUND_BY: f"{now} run {job.run_id} launch {job.launch}"},
        }
        try:
            patient.apply(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": metadata}, MANAGER)
        except HoldfastError as error:
            log.warning(
                "node %s is not labelled %s=%s, and other runs may land there: %s; apply "
                "manifests/components/node-health, or set cluster.health.on_failure: nothing",
                name,
                HEALTH_LABEL,
                FAILED,
                error,
            )
        else:
            log.warning("node %s failed its health check and is labelled %s=%s", name, HEALTH_LABEL, FAILED)
