"""The champion as a Deployment and a Service: vLLM without KServe.

An init container downloads the export from the bucket and checks each byte by its digest, so a pod never serves other
weights than the registered ones. The digest is in the pod's template: a new champion is rolled out.
"""

from typing import Any

from holdfast.launch.kubernetes.api_errors import DEPLOYMENT_ACCOUNTS
from holdfast.launch.kubernetes.client import Api, Resource
from holdfast.serving.kserve import MANAGER
from holdfast.serving.pods import (
    MODEL_FOLDER,
    PORT,
    metadata_of,
    name_of,
    placement_of,
    require_bucket,
    shared_memory,
    vllm_container,
)
from holdfast.spec import Spec
from holdfast.spec.errors import AccessDeniedError, MissingError, Problem, SpecError
from holdfast.spec.operations import Deployment

DEPLOYMENTS = Resource("apps", "v1", "deployments")
SERVICES = Resource("", "v1", "services")
MODEL_VOLUME = {"name": "model", "mountPath": MODEL_FOLDER}
FETCH_RESOURCES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
EXTRA_SECONDS = 1800  # for the download, in addition to the start of the server


def deployment(
    spec: Spec, store_url: str, export: str, digest: str, lineage: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Deployment and the Service of `spec` for the export with this digest. `lineage` becomes annotations.

    Raises SpecError where the spec has no `serving.deployment`, no image, or no bucket.
    """
    settings = spec.serving.deployment
    if settings is None:
        problem = Problem("serving.deployment", None, "is missing", "say how the champion is served: docs/serving.md")
        raise SpecError([problem])
    require_bucket(store_url, "a Deployment")
    image = settings.image or spec.cluster.image
    if image is None:
        problem = Problem(
            "serving.deployment.image", None, "is missing", "name the image of Holdfast, or cluster.image"
        )
        raise SpecError([problem])
    metadata = metadata_of(spec, settings, lineage)
    selector = {"app.kubernetes.io/name": "holdfast-model", "app.kubernetes.io/instance": name_of(spec, settings)}
    body: dict[str, Any] = {
        "selector": {"matchLabels": selector},
        "progressDeadlineSeconds": settings.vllm.startup_minutes * 60 + EXTRA_SECONDS,
        "template": {
            "metadata": {
                "labels": {**settings.labels, **selector},
                "annotations": {"holdfast/export_digest": digest, **metadata["annotations"]},
            },
            "spec": _pod(spec, settings, image, [store_url, export, digest]),
        },
    }
    if settings.replicas is not None:
        body["replicas"] = settings.replicas
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "annotations": {}},
        "spec": {"selector": selector, "ports": [{"name": "http", "port": 80, "targetPort": PORT, "protocol": "TCP"}]},
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": body}, service


def apply(objects: tuple[dict[str, Any], dict[str, Any]], api: Api) -> None:
    """Create or update the Deployment and its Service. Raises MissingError without the namespace, AccessDeniedError
    without the right, and ClusterUnreachableError."""
    try:
        for resource, wanted in zip((DEPLOYMENTS, SERVICES), objects, strict=True):
            api.apply(resource, wanted, MANAGER)
    except MissingError as error:
        raise MissingError(f"{error}; create the namespace {api.namespace!r}") from None
    except AccessDeniedError as error:
        if DEPLOYMENT_ACCOUNTS in str(error):
            raise
        raise AccessDeniedError(
            f"{error}; the account needs create and patch on deployments.apps and services: "
            "manifests/components/serving-deployment"
        ) from None


def _pod(spec: Spec, settings: Deployment, image: str, source: list[str]) -> dict[str, Any]:
    fetch: dict[str, Any] = {
        "name": "fetch",
        "image": image,
        "command": ["python", "-m", "holdfast.serving.fetch", *source, MODEL_FOLDER],
        "resources": FETCH_RESOURCES,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [MODEL_VOLUME],
    }
    if settings.secret:
        fetch["envFrom"] = [{"secretRef": {"name": settings.secret}}]
    server = vllm_container(spec, settings, settings.vllm, "vllm")
    server["volumeMounts"] = [*server["volumeMounts"], {**MODEL_VOLUME, "readOnly": True}]
    if settings.key_secret:
        key = {"secretKeyRef": {"name": settings.key_secret, "key": "api-key"}}
        server["env"] = [{"name": "VLLM_API_KEY", "valueFrom": key}]
    return {
        "automountServiceAccountToken": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "initContainers": [fetch],
        "containers": [server],
        "volumes": [shared_memory(settings.vllm), {"name": MODEL_VOLUME["name"], "emptyDir": {}}],
        **placement_of(spec, settings),
    }
