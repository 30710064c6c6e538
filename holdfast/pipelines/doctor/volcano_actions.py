"""Check that Volcano's scheduler may preempt jobs for more important ones. Its defaults do not allow that."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.custom_resources import VOLCANO_QUEUES
from holdfast.pipelines.doctor.findings import Finding

NAME = "volcano actions"
PLACE, MAP = "volcano-system", "volcano-scheduler-configmap"


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the actions in the scheduler's settings."""
    import yaml

    if VOLCANO_QUEUES not in cluster.served:
        return
    found = cluster.api.read(f"/api/v1/namespaces/{PLACE}/configmaps/{MAP}")
    if found is None:
        message = f"{PLACE} has no {MAP}: the scheduler's actions are unknown"
        yield Finding(NAME, "warn", message, "look where Volcano is installed: kubectl get pods -A")
        return
    settings = yaml.safe_load(found["data"].get("volcano-scheduler.conf", "")) or {}
    actions = [action.strip() for action in str(settings.get("actions", "")).split(",")]
    missing = [action for action in ("preempt", "reclaim") if action not in actions]
    if not missing:
        yield Finding(NAME, "ok", f"actions are {', '.join(actions)}")
        return
    message = f"actions are {', '.join(actions)}: without {' and '.join(missing)}, priorities displace nothing"
    wanted = ", ".join([*(action for action in actions if action != "backfill"), *missing, "backfill"])
    yield Finding(NAME, "warn", message, f'kubectl edit -n {PLACE} configmap {MAP}, and write actions: "{wanted}"')
