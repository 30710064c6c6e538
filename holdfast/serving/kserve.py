"""The champion as an InferenceService of KServe (serving.kserve.io/v1beta1), which reads the export from the bucket.

Writes use server-side apply under the field manager `holdfast`. Fields that an autoscaler or a person sets stay.
"""

from __future__ import annotations

from typing import Any

from holdfast.launch.accelerators import ACCELERATORS, taint_of
from holdfast.launch.kubernetes.client import Api, Resource
from holdfast.spec import Spec
from holdfast.spec.engine_text import double_dollars
from holdfast.spec.errors import AccessDeniedError, MissingError, Problem, SpecError
from holdfast.spec.operations import Kserve

API = Resource("serving.kserve.io", "v1beta1", "inferenceservices")
MANAGER = "holdfast"


def inference_service(spec: Spec, source: str, lineage: dict[str, str]) -> dict[str, Any]:
    """The InferenceService of `spec` for the export at `source` (s3://bucket/key/). `lineage` becomes annotations.

    Raises SpecError where the spec has no `serving.kserve`, or KServe cannot read from `source`.
    """
    settings = spec.serving.kserve
    if settings is None:
        problem = Problem("serving.kserve", None, "is missing", "say how the champion is served: docs/serving.md")
        raise SpecError([problem])
    if not source.startswith("s3://"):
        problem = Problem("store", source, "is no bucket, and KServe reads models from one", "use s3://bucket/prefix")
        raise SpecError([problem])
    metadata: dict[str, Any] = {
        "name": settings.name or spec.name,
        "labels": {**settings.labels, "app.kubernetes.io/name": "holdfast", "app.kubernetes.io/managed-by": "holdfast"},
        "annotations": {**settings.annotations, **{f"holdfast/{name}": value for name, value in lineage.items()}},
    }
    if namespace := settings.namespace or spec.cluster.namespace:
        metadata["namespace"] = namespace
    return {
        "apiVersion": f"{API.group}/{API.version}",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": _predictor(spec, settings, source)},
    }


def apply(service: dict[str, Any], api: Api) -> None:
    """Create or update the InferenceService. Raises MissingError without KServe, AccessDeniedError without the right,
    and ClusterUnreachableError.
    """
    try:
        api.apply(API, service, MANAGER)
    except MissingError as error:
        raise MissingError(f"{error}; is KServe installed, and the namespace {api.namespace!r} there?") from None
    except AccessDeniedError as error:
        raise AccessDeniedError(
            f"{error}; the account needs create and patch on {API}: manifests/components/kserve"
        ) from None


def _predictor(spec: Spec, settings: Kserve, source: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": settings.cpu, "memory": settings.memory}
    tolerations = list(settings.tolerations)
    if settings.accelerators:
        resources[str(ACCELERATORS[spec.cluster.accelerator].resource)] = str(settings.accelerators)
        tolerations.append(taint_of(spec.cluster.accelerator))
    model: dict[str, Any] = {
        "modelFormat": {"name": "huggingface"},
        "storageUri": source,
        "resources": {"requests": resources, "limits": resources},
    }
    if settings.runtime:
        model["runtime"] = settings.runtime
    if settings.arguments:
        model["args"] = [_as_written(argument) for argument in settings.arguments]
    predictor: dict[str, Any] = {
        "minReplicas": settings.min_replicas,
        "maxReplicas": settings.max_replicas,
        "model": model,
    }
    if settings.service_account:
        predictor["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        predictor["nodeSelector"] = dict(settings.node_selector)
    if tolerations:
        predictor["tolerations"] = [taint.model_dump(exclude_none=True) for taint in tolerations]
    return predictor


def _as_written(argument: str) -> str:
    """Escape an argument for KServe, whose containers are Go templates, and then for the kubelet."""
    return double_dollars(argument).replace("{{", "{{`{{`}}")
