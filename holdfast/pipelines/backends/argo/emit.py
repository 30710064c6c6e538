"""Argo objects of a spec for `kubectl apply`: the WorkflowTemplate, and the CronWorkflow if there is a schedule.

The same spec gives the same bytes, and the objects have passed `check`.
"""

from __future__ import annotations

from typing import Any

from holdfast.pipelines.backends.argo.check import check
from holdfast.pipelines.backends.argo.schedule import cron_workflow
from holdfast.pipelines.backends.argo.template import workflow_template
from holdfast.pipelines.backends.sizes import require_fits_argo
from holdfast.pipelines.documents import as_yaml
from holdfast.spec import Spec

HEADER = "# Compiled by Holdfast from the spec `{name}`, for Argo Workflows.\n"


def argo_objects(spec: Spec, *, image: str | None = None, namespace: str | None = None) -> list[dict[str, Any]]:
    """The objects of `spec`, in the order in which to apply them. See `workflow_template` for the arguments."""
    namespace = namespace or spec.cluster.namespace
    found = [workflow_template(spec, image=image, namespace=namespace).to_dict()]
    if spec.schedule.cron is not None or spec.schedule.every_minutes is not None:
        found.append(cron_workflow(spec, namespace=namespace).to_dict())
    if problems := check(found):
        raise AssertionError("the objects of Argo refer to what is not there:\n" + "\n".join(problems))
    require_fits_argo(found)
    return found


def argo_text(spec: Spec, *, image: str | None = None, namespace: str | None = None) -> str:
    """The objects of `spec` as YAML for kubectl."""
    objects = argo_objects(spec, image=image, namespace=namespace)
    return HEADER.format(name=spec.name) + as_yaml(*objects)
