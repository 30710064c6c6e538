"""The `serving` section: what becomes of a champion outside MLflow. Without it, nothing does."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from holdfast.spec.cluster import LabelKey, LabelValue, NamespaceName, ObjectName, Quantity, Toleration
from holdfast.spec.section import Section, runtime_field

# As KServe's own webhook has it.
ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,51}[a-z0-9])?$")]


class Kserve(Section):
    """An InferenceService of KServe that serves the champion with its Hugging Face runtime, straight from the store.
    Without this section there is none."""

    name: ServiceName | None = runtime_field(None, "Name of the InferenceService; none takes the spec's name.")
    namespace: NamespaceName | None = runtime_field(None, "Its namespace; none takes the one of the pipeline run.")
    service_account: ObjectName | None = runtime_field(
        None, "Service account whose Secrets, or whose cloud identity, open the bucket; none takes the default one."
    )
    runtime: ObjectName | None = runtime_field(
        None, "ServingRuntime or ClusterServingRuntime; none lets KServe choose one for Hugging Face models."
    )
    min_replicas: int = runtime_field(
        1, "Fewest pods; 0 lets it go to sleep, where KServe can do that.", ge=0, le=10_000
    )
    max_replicas: int = runtime_field(1, "Most pods.", ge=1, le=10_000)
    cpu: Quantity = runtime_field("2", "CPU cores of each pod, as a Kubernetes quantity.")
    memory: Quantity = runtime_field("8Gi", "Memory of each pod, as a Kubernetes quantity.")
    accelerators: int = runtime_field(0, "Accelerators of each pod, of the kind `cluster.accelerator`.", ge=0, le=64)
    arguments: tuple[str, ...] = runtime_field(
        (), "More arguments of the runtime, such as `--dtype=bfloat16`.", max_length=64
    )
    node_selector: dict[LabelKey, LabelValue] = runtime_field({}, "Labels that the nodes must have.")
    tolerations: tuple[Toleration, ...] = runtime_field((), "Taints that the pods accept.", max_length=64)
    labels: dict[LabelKey, LabelValue] = runtime_field({}, "Labels of the InferenceService.")
    annotations: dict[LabelKey, str] = runtime_field(
        {}, "Annotations of the InferenceService, such as its deployment mode."
    )


class ModelRegistry(Section):
    """An entry in a Kubeflow Model Registry for every registered version. Without this section there is none. A token,
    where the registry wants one, comes from MODEL_REGISTRY_TOKEN and is sent to the server in MODEL_REGISTRY_TOKEN_FOR
    (such as https://registry.example) alone."""

    url: str = runtime_field(
        ...,
        "Root of the registry's REST API, such as http://model-registry-service.kubeflow.svc:8080.",
        pattern=r"^https?://[^/?#]{1,253}(/[^?#]{0,500})?$",
    )
    author: str = runtime_field("holdfast", "Who is named as the author of the versions.", min_length=1, max_length=200)


class Serving(Section):
    """What becomes of a model once it is registered, outside MLflow."""

    kserve: Kserve | None = Field(
        None, description="How the champion is served.", json_schema_extra={"role": "neither"}
    )
    model_registry: ModelRegistry | None = Field(
        None, description="Where versions are listed.", json_schema_extra={"role": "neither"}
    )
