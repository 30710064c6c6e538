"""Health check of a gang's ranks before they train, if the launch requests one."""

import logging

import torch

from holdfast.collectives import Gang
from holdfast.engines.assignment import Assignment
from holdfast.health.examine import examine, require_health
from holdfast.health.verdict import Report
from holdfast.runtime.environment import cache_dir
from holdfast.spec import Spec
from holdfast.store import Store, layout
from holdfast.store.sequence import record_key, take_next
from holdfast.telemetry import emit
from holdfast.telemetry.events import HealthChecked

log = logging.getLogger("holdfast.train")


def health_check_request(spec: Spec, blamed: tuple[str, ...]) -> dict[str, float | str]:
    """The health check fields of an assignment. `blamed` are the nodes blamed for the end of the launch before."""
    health, cluster = spec.cluster.health, spec.cluster
    if health.before == "never":
        return {}
    if blamed:
        return {
            "health_seconds": health.seconds,
            "health_reason": f"the launch before blames {', '.join(blamed)} for its end",
        }
    several = cluster.nodes.max > 1 and cluster.accelerator != "cpu"
    if health.before == "always" or several:
        return {"health_seconds": health.seconds, "health_reason": f"cluster.health.before: {health.before}"}
    return {}


def check_health(store: Store, spec: Assignment, device: torch.device, gang: Gang, launch: int) -> None:
    """Run the health check if the assignment requests one, and record its result. A collective call. Raises what
    `require_health` and `examine` raise."""
    if spec.health_seconds is None:
        return
    folder = layout.health(spec.run_id)
    report = examine(gang, device, store, folder, cache_dir(), spec.health_seconds, spec.health_reason)
    gang.from_rank_0(lambda: _tell(store, folder, report, launch))
    require_health(report, gang.rank)


def _tell(store: Store, folder: str, report: Report, launch: int) -> None:
    number = take_next(store, folder, {"launch": launch, "report": report.model_dump(mode="json")})
    texts = {
        severity: "; ".join(finding.words for finding in report.findings if finding.severity == severity)
        for severity in ("failed", "warned")
    }
    event = HealthChecked(
        ranks=len(report.measured), seconds=report.seconds, reason=report.why, key=record_key(folder, number), **texts
    )
    log.log(logging.WARNING if event.is_news else logging.INFO, "%s", event.text)
    emit(event)
