"""What all objects that serve a champion share: metadata, resources, placement, and the container of vLLM."""

from typing import Any

from holdfast.launch.accelerators import ACCELERATORS, taint_of
from holdfast.spec import Spec
from holdfast.spec.engine_text import double_dollars
from holdfast.spec.errors import Problem, SpecError
from holdfast.spec.operations import ServingPods, VllmServer

PORT = 8080  # of vLLM
MODEL_FOLDER = "/mnt/models"  # also where KServe's storage initializer downloads to
SHARED_MEMORY = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108 - of a container
PROBE_SECONDS = 10


def name_of(spec: Spec, settings: ServingPods) -> str:
    """The name of the objects, and of the model for clients of vLLM."""
    return settings.name or spec.name


def metadata_of(spec: Spec, settings: ServingPods, lineage: dict[str, str]) -> dict[str, Any]:
    """Name, labels and namespace. `lineage` becomes annotations."""
    metadata: dict[str, Any] = {
        "name": name_of(spec, settings),
        "labels": {**settings.labels, "app.kubernetes.io/name": "holdfast", "app.kubernetes.io/managed-by": "holdfast"},
        "annotations": {**settings.annotations, **{f"holdfast/{name}": value for name, value in lineage.items()}},
    }
    if namespace := settings.namespace or spec.cluster.namespace:
        metadata["namespace"] = namespace
    return metadata


def require_bucket(source: str, reader: str) -> None:
    """Raises SpecError unless the export is in a bucket."""
    if not source.startswith("s3://"):
        message = f"is no bucket, and {reader} reads models from one"
        raise SpecError([Problem("store", source, message, "use s3://bucket/prefix")])


def resources_of(spec: Spec, settings: ServingPods) -> dict[str, Any]:
    """Requests and limits of the serving container."""
    resources: dict[str, Any] = {"cpu": settings.cpu, "memory": settings.memory}
    if settings.accelerators:
        resources[str(ACCELERATORS[spec.cluster.accelerator].resource)] = str(settings.accelerators)
    return {"requests": resources, "limits": resources}


def placement_of(spec: Spec, settings: ServingPods) -> dict[str, Any]:
    """The fields of a pod that choose its account and its node."""
    tolerations = list(settings.tolerations)
    if settings.accelerators:
        tolerations.append(taint_of(spec.cluster.accelerator))
    fields: dict[str, Any] = {}
    if settings.service_account:
        fields["serviceAccountName"] = settings.service_account
    if settings.node_selector:
        fields["nodeSelector"] = dict(settings.node_selector)
    if tolerations:
        fields["tolerations"] = [taint.model_dump(exclude_none=True) for taint in tolerations]
    return fields


def vllm_container(spec: Spec, settings: ServingPods, vllm: VllmServer, name: str) -> dict[str, Any]:
    """The container of vLLM's server for the model in MODEL_FOLDER, with all its probes."""
    own = [f"--model={MODEL_FOLDER}", f"--served-model-name={name_of(spec, settings)}", f"--port={PORT}"]
    if settings.accelerators > 1:
        own.append(f"--tensor-parallel-size={settings.accelerators}")
    given = {argument.partition("=")[0] for argument in settings.arguments}
    health = {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": PROBE_SECONDS, "timeoutSeconds": 5}
    return {
        "name": name,
        "image": vllm.image,
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": [
            *(argument for argument in own if argument.partition("=")[0] not in given),
            *map(double_dollars, settings.arguments),
        ],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "resources": resources_of(spec, settings),
        "startupProbe": {**health, "failureThreshold": vllm.startup_minutes * 60 // PROBE_SECONDS},
        "readinessProbe": {**health, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [SHARED_MEMORY],
    }


def shared_memory(vllm: VllmServer) -> dict[str, Any]:
    """The volume of /dev/shm, through which the processes of vLLM exchange tensors."""
    return {"name": SHARED_MEMORY["name"], "emptyDir": {"medium": "Memory", "sizeLimit": vllm.shared_memory}}
