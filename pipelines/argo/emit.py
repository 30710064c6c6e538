"""From a spec to a file for `kubectl apply`: the WorkflowTemplate, and the CronWorkflow where there is a schedule.

Promises the same bytes for the same spec, and that what is written has passed `check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from components.spec import Spec
from pipelines.argo.check import check
from pipelines.argo.schedule import cron_workflow
from pipelines.argo.template import workflow_template
from pipelines.compile import Dumper

HEADER = "# Compiled by Holdfast from the spec `{name}`, for Argo Workflows.\n"


def argo_objects(
    spec: Spec, *, image: str | None = None, namespace: str | None = None, artifacts: bool = True
) -> list[dict[str, Any]]:
    """The objects of `spec`, in the order in which to apply them. See `workflow_template` for the arguments."""
    namespace = namespace or spec.cluster.namespace
    found = [workflow_template(spec, image=image, namespace=namespace, artifacts=artifacts).to_dict()]
    if spec.schedule.cron is not None or spec.schedule.every_minutes is not None:
        found.append(cron_workflow(spec, namespace=namespace).to_dict())
    if problems := check(found):
        raise AssertionError("the objects of Argo refer to what is not there:\n" + "\n".join(problems))
    return found


def compile_argo(
    spec: Spec, path: Path, *, image: str | None = None, namespace: str | None = None, artifacts: bool = True
) -> None:
    """Write the objects of `spec` to `path` as YAML, in whole or not at all."""
    documents = yaml.dump_all(
        argo_objects(spec, image=image, namespace=namespace, artifacts=artifacts),
        Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(HEADER.format(name=spec.name) + documents, encoding="utf-8")
    temporary.replace(path)
