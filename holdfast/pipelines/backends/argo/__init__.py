"""The DAG for Argo Workflows: the steps of `holdfast.pipelines.table` as WorkflowTemplate and CronWorkflow.

All objects are checked before they are written: Hera accepts a reference to a missing task or argument, and Argo
reports it only at run time. `pods` has the pods, and `schedule` the schedule.
"""

from holdfast.pipelines.backends.argo.check import check
from holdfast.pipelines.backends.argo.emit import argo_objects, argo_text, cron_workflow, schedules
from holdfast.pipelines.backends.argo.template import template_name, workflow_template

__all__ = [
    "argo_objects",
    "argo_text",
    "check",
    "cron_workflow",
    "schedules",
    "template_name",
    "workflow_template",
]
