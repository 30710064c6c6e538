"""What would be sent to a cluster, held against what the cluster takes, before it is sent.

The API server itself is asked where one is reachable: a dry run with strict fields, which runs its schemas and its
admission and makes nothing. Without one the typed models of Hera know Argo's objects, and the rest is not looked at.
Promises to say which of them it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from holdfast.launch.kubernetes.api_errors import ConflictError, WebhookAwayError
from holdfast.launch.kubernetes.client import Api, Resource
from holdfast.launch.kubernetes.configuration import NoClusterError
from holdfast.spec.errors import ClusterUnreachableError, HoldfastError, MissingError, SpecError

Object = dict[str, Any]
PATIENCE = 5.0  # seconds: whoever rehearses waits for the answer
PLURALS = {
    "PyTorchJob": "pytorchjobs", "TrainJob": "trainjobs", "TrainingRuntime": "trainingruntimes", "Job": "jobs",
    "Workflow": "workflows", "WorkflowTemplate": "workflowtemplates", "CronWorkflow": "cronworkflows",
    "RayJob": "rayjobs", "InferenceService": "inferenceservices",
}  # fmt: skip


@dataclass(frozen=True)
class Validated:
    """What came of it."""

    by: str  # who looked, in words
    problems: list[str]  # in the words of who looked
    unseen: list[str]  # kinds that nobody looked at
    checked: int  # objects that were looked at


def validate(objects: Sequence[Object], namespace: str | None = None) -> Validated:
    """Look at Kubernetes objects; others, such as requests to KFP, are passed over. `namespace`: where they would be,
    unless they say so."""
    ours = [thing for thing in objects if thing.get("kind") in PLURALS and "apiVersion" in thing]
    try:
        return _by_server(Api.of_this_process(namespace, patience=PATIENCE), ours)
    except (NoClusterError, ClusterUnreachableError):
        return _by_models(ours)


def _by_server(api: Api, objects: Sequence[Object]) -> Validated:
    """Raises ClusterUnreachableError."""
    problems, unseen = [], []
    for thing in objects:
        group, _, served = thing["apiVersion"].rpartition("/")
        resource = Resource(group, served, PLURALS[thing["kind"]])
        path = resource.path(thing["metadata"].get("namespace") or api.namespace)
        try:
            api.ask(f"{path}?dryRun=All&fieldValidation=Strict", thing)
        except ConflictError:
            continue  # it is there already, and the fields are looked at before the name
        except MissingError:
            unseen.append(f"{thing['kind']} (not served, or no such namespace)")
        except HoldfastError as error:
            if isinstance(error, ClusterUnreachableError) and not isinstance(error, WebhookAwayError):
                raise
            problems.append(f"{thing['kind']} {_name(thing)}: {_words(error)}")
    return Validated(f"the API server {api.host}", problems, unseen, len(objects) - len(unseen))


def _by_models(objects: Sequence[Object]) -> Validated:
    from hera.workflows import models
    from pydantic import ValidationError

    problems, unseen = [], []
    for thing in objects:
        model = getattr(models, thing["kind"], None) if thing["apiVersion"].startswith("argoproj.io/") else None
        if model is None:
            unseen.append(thing["kind"])
            continue
        try:
            model.model_validate(thing)
        except ValidationError as error:
            problems += [
                f"{thing['kind']} {_name(thing)}: {'.'.join(map(str, one['loc']))}: {one['msg']}"
                for one in error.errors()
            ]
    by = f"the models of Hera {version('hera')}, since no API server can be reached"
    return Validated(by, problems, unseen, len(objects) - len(unseen))


def _words(error: HoldfastError) -> str:
    """What the server said, whole."""
    return str(error.problems[0].value) if isinstance(error, SpecError) else str(error)


def _name(thing: Object) -> str:
    metadata = thing.get("metadata", {})
    return str(metadata.get("name") or metadata.get("generateName") or "")
