"""The DAG for Argo Workflows: the same steps as `holdfast.pipelines.table`, as WorkflowTemplate and CronWorkflow.

Promises objects that are checked before they leave: Hera writes down a task or an argument that does not exist, and
Argo would say so at night. Leaves what the pods look like to `pods`, and when the DAG runs by itself to `schedule`.
"""

from holdfast.pipelines.backends.argo.check import check
from holdfast.pipelines.backends.argo.emit import argo_objects, argo_text
from holdfast.pipelines.backends.argo.schedule import cron_workflow, schedules
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
