"""The `serving` section: where a registered model is served and listed outside MLflow. Without it: nowhere."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from holdfast.spec.cluster import LabelKey, LabelValue, NamespaceName, ObjectName, Quantity, Toleration
from holdfast.spec.section import Section, runtime_field

# The pattern of KServe's own webhook.
ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,51}[a-z0-9])?$")]


class Kserve(Section):
    """An InferenceService of KServe that serves the champion from the store, with KServe's Hugging Face runtime.
    Without this section none is created."""

    name: ServiceName | None = runtime_field(None, "Name of the InferenceService. Default: the spec's name.")
    namespace: NamespaceName | None = runtime_field(None, "Its namespace. Default: the namespace of the pipeline run.")
    service_account: ObjectName | None = runtime_field(
        None,
        "Service account with access to the bucket, by its Secrets or cloud identity. Default: the default account.",
    )
    runtime: ObjectName | None = runtime_field(
        None, "ServingRuntime or ClusterServingRuntime. Default: KServe chooses one for Hugging Face models."
    )
    min_replicas: int = runtime_field(
        1, "Minimum number of pods; 0 allows scale to zero, if KServe supports it.", ge=0, le=10_000
    )
    max_replicas: int = runtime_field(1, "Maximum number of pods.", ge=1, le=10_000)
    cpu: Quantity = runtime_field("2", "CPU cores of each pod, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("8Gi", "Memory of each pod, as a Kubernetes quantity.")
    accelerators: int = runtime_field(0, "Accelerators of each pod, of the kind `cluster.accelerator`.", ge=0, le=64)
    arguments: tuple[str, ...] = runtime_field(
        (), "Additional arguments of the runtime, such as `--dtype=bfloat16`.", max_length=64
    )
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that the nodes must have.")
    tolerations: tuple[Toleration, ...] = runtime_field((), "Taints that the pods accept.", max_length=64)
    labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the InferenceService.")
    annotations: dict[LabelKey, str] = runtime_field(
        {}, "Annotations of the InferenceService, such as its deployment mode."
    )


class ModelRegistry(Section):
    """An entry in a Kubeflow Model Registry for every registered version. Without this section none is created. If the
    registry requires a token, set MODEL_REGISTRY_TOKEN, and MODEL_REGISTRY_TOKEN_FOR to the server (such as
    https://registry.example). The token is sent to that server only."""

    url: str = runtime_field(
        ...,
        "Root of the registry's REST API, such as http://model-registry-service.kubeflow.svc:8080.",
        pattern=r"^https?://[^/?#]{1,253}(/[^?#]{0,500})?$",
    )
    author: str = runtime_field("holdfast", "Author of the versions.", min_length=1, max_length=200)


class Serving(Section):
    """What happens to a registered model outside MLflow."""

    kserve: Kserve | None = Field(
        None, description="How the champion is served.", json_schema_extra={"role": "neither"}
    )
    model_registry: ModelRegistry | None = Field(
        None, description="The registry that lists the versions.", json_schema_extra={"role": "neither"}
    )
