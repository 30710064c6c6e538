"""Check of objects for a cluster before they are sent.

If an API server is reachable, it checks them in a dry run with strict fields: schemas and admission run, and nothing is
created. Otherwise the official schemas that come with Holdfast check them, as strictly, without admission. Kubernetes'
own kinds, such as Job, have none. The result says which of the two was used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.launch.kubernetes.api_errors import ConflictError, WebhookAwayError
from holdfast.launch.kubernetes.client import Api, Resource
from holdfast.launch.kubernetes.configuration import NoClusterError
from holdfast.spec.errors import ClusterUnreachableError, HoldfastError, MissingError, SpecError

Object = dict[str, Any]
PATIENCE = 5.0  # seconds; a person waits for the result of a dry run
PLURALS = {
    "PyTorchJob": "pytorchjobs",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "Job": "jobs",
    "Workflow": "workflows",
    "WorkflowTemplate": "workflowtemplates",
    "CronWorkflow": "cronworkflows",
    "RayJob": "rayjobs",
    "InferenceService": "inferenceservices",
}


@dataclass(frozen=True)
class Validated:
    """The result of the check."""

    by: str  # name of the checker
    problems: list[str]  # messages of the checker
    unseen: list[str]  # kinds that were not checked
    checked: int  # number of checked objects


def validate(objects: Sequence[Object], namespace: str | None = None, context: str = "") -> Validated:
    """Check Kubernetes objects. Others, such as requests to KFP, are skipped. `namespace`: default of the objects.
    `context`: of the kubeconfig."""
    manifests = [manifest for manifest in objects if manifest.get("kind") in PLURALS and "apiVersion" in manifest]
    try:
        validated = _by_server(Api.of_this_process(namespace, PATIENCE, context), manifests)
    except (NoClusterError, ClusterUnreachableError):
        validated = _by_schemas(manifests)
    return replace(validated, by=f"{validated.by} (context {context})") if context else validated


def _by_server(api: Api, objects: Sequence[Object]) -> Validated:
    """Check by a dry run. Raises ClusterUnreachableError."""
    problems, unseen = [], []
    for manifest in objects:
        group, _, served = manifest["apiVersion"].rpartition("/")
        resource = Resource(group, served, PLURALS[manifest["kind"]])
        path = resource.path(manifest["metadata"].get("namespace") or api.namespace)
        try:
            api.ask(f"{path}?dryRun=All&fieldValidation=Strict", manifest)
        except ConflictError:
            continue  # it exists, and the server checks fields before names
        except MissingError:
            unseen.append(f"{manifest['kind']} (not served, or no such namespace)")
        except HoldfastError as error:
            if isinstance(error, ClusterUnreachableError) and not isinstance(error, WebhookAwayError):
                raise
            problems.append(f"{manifest['kind']} {_name(manifest)}: {_words(error)}")
    return Validated(f"the API server {api.host}", problems, unseen, len(objects) - len(unseen))


def _by_schemas(objects: Sequence[Object]) -> Validated:
    from holdfast.launch.kubernetes import schemas

    problems, unseen = [], []
    for manifest in objects:
        messages = schemas.problems(manifest)
        if messages is None:
            unseen.append(manifest["kind"])
        else:
            problems += [f"{manifest['kind']} {_name(manifest)}: {problem}" for problem in messages]
    by = "the schemas that come with Holdfast, because no API server can be reached"
    return Validated(by, problems, unseen, len(objects) - len(unseen))


def _words(error: HoldfastError) -> str:
    """The server's complete message."""
    return str(error.problems[0].value) if isinstance(error, SpecError) else str(error)


def _name(thing: Object) -> str:
    metadata = thing.get("metadata", {})
    return str(metadata.get("name") or metadata.get("generateName") or "")
