"""The champion as an InferenceService of KServe (serving.kserve.io/v1beta1), which reads the export from the bucket.

Writes use server-side apply under the field manager `holdfast`. Fields that an autoscaler or a person sets stay.
"""

from typing import Any

from holdfast.launch.kubernetes.client import Api, Resource
from holdfast.serving.pods import (
    metadata_of,
    placement_of,
    require_bucket,
    resources_of,
    shared_memory,
    vllm_container,
)
from holdfast.spec import Spec
from holdfast.spec.engine_text import double_dollars
from holdfast.spec.errors import AccessDeniedError, MissingError, Problem, SpecError
from holdfast.spec.operations import Kserve

API = Resource("serving.kserve.io", "v1beta1", "inferenceservices")
MANAGER = "holdfast"
CONTAINER = "kserve-container"  # the name of the container that KServe gives the model to


def inference_service(spec: Spec, source: str, lineage: dict[str, str]) -> dict[str, Any]:
    """The InferenceService of `spec` for the export at `source` (s3://bucket/key/). `lineage` becomes annotations.

    Raises SpecError where the spec has no `serving.kserve`, or KServe cannot read from `source`.
    """
    settings = spec.serving.kserve
    if settings is None:
        problem = Problem("serving.kserve", None, "is missing", "say how the champion is served: docs/serving.md")
        raise SpecError([problem])
    require_bucket(source, "KServe")
    return {
        "apiVersion": f"{API.group}/{API.version}",
        "kind": "InferenceService",
        "metadata": metadata_of(spec, settings, lineage),
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
    predictor: dict[str, Any] = {
        "minReplicas": settings.min_replicas,
        "maxReplicas": settings.max_replicas,
        **placement_of(spec, settings),
    }
    if settings.vllm is not None:
        container = vllm_container(spec, settings, settings.vllm, CONTAINER)
        container["env"] = [{"name": "STORAGE_URI", "value": source}]  # KServe downloads it to MODEL_FOLDER
        return {**predictor, "containers": [container], "volumes": [shared_memory(settings.vllm)]}
    model: dict[str, Any] = {
        "modelFormat": {"name": "huggingface"},
        "storageUri": source,
        "resources": resources_of(spec, settings),
    }
    if settings.runtime:
        model["runtime"] = settings.runtime
    if settings.arguments:
        model["args"] = [_as_written(argument) for argument in settings.arguments]
    return {**predictor, "model": model}


def _as_written(argument: str) -> str:
    """Escape an argument for KServe, whose containers are Go templates, and then for the kubelet."""
    return double_dollars(argument).replace("{{", "{{`{{`}}")
