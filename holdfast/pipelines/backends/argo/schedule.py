"""The CronWorkflow of a spec with a `schedule` section.

It names the WorkflowTemplate and its entrypoint `retrain`. So a new template affects the next run and none in flight.
"""

from __future__ import annotations

from hera.workflows import CronWorkflow
from hera.workflows.models import WorkflowTemplateRef

from holdfast.pipelines.backends.argo.template import RETRAIN, labels, template_name
from holdfast.spec import Spec
from holdfast.spec.cron import expand
from holdfast.spec.errors import Problem, SpecError

HOUR, DAY = 60, 24 * 60  # minutes
KEPT = 3  # ended Workflows of each kind


def cron_workflow(spec: Spec, *, namespace: str | None = None) -> CronWorkflow:
    """The CronWorkflow of `spec`. Runs never overlap, and a run past its starting deadline is skipped.

    Raises SpecError when the spec has no schedule.
    """
    return CronWorkflow(
        name=template_name(spec),
        namespace=namespace,
        labels=labels(),
        schedules=schedules(spec),
        timezone=spec.schedule.timezone,
        concurrency_policy="Forbid",
        starting_deadline_seconds=spec.schedule.starting_deadline_seconds,
        successful_jobs_history_limit=KEPT,
        failed_jobs_history_limit=KEPT,
        workflow_template_ref=WorkflowTemplateRef(name=template_name(spec)),
        entrypoint=RETRAIN,
    )


def schedules(spec: Spec) -> list[str]:
    """The schedule as cron expressions; `@every` for an interval that does not divide an hour or a day."""
    schedule = spec.schedule
    if schedule.cron is not None:
        return [expand(schedule.cron)]
    minutes = schedule.every_minutes
    if minutes is None:
        remedy = "write schedule.cron: '0 3 * * 1', or schedule.every_minutes: 60"
        raise SpecError([Problem("schedule", None, "says neither cron nor every_minutes", remedy)])
    if minutes < HOUR and HOUR % minutes == 0:
        return [f"*/{minutes} * * * *" if minutes > 1 else "* * * * *"]
    if minutes % HOUR == 0 and DAY % minutes == 0:
        return [
            f"0 */{minutes // HOUR} * * *" if HOUR < minutes < DAY else "0 * * * *" if minutes == HOUR else "0 0 * * *"
        ]
    return [f"@every {minutes}m"]
