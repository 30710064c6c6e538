"""What the pod of a step has, whichever system makes it: image, resources, environment, and where its settings are.

It knows no scheduler and no priority class: those belong to the training job, which the train step's launcher makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.components.launch.accelerators import slice_resource, training_image
from holdfast.components.runtime.outcomes import POD
from holdfast.components.runtime.shell import IMAGE
from holdfast.components.spec import Spec
from holdfast.components.steps import Step

# A ConfigMap in the namespace of the run with the defaults of that place; it and each of its keys may be missing.
SETTINGS = "holdfast-settings"
SETTINGS_KEYS = ("HOLDFAST_STORE", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_REGION")
# What the train step's launcher needs to own the training job on behalf of the pipeline run, and to find it again.
FIELDS = {
    POD: "metadata.name",
    "HOLDFAST_POD_UID": "metadata.uid",
    "HOLDFAST_NAMESPACE": "metadata.namespace",
    "HOLDFAST_WORKFLOW": "metadata.labels['workflows.argoproj.io/workflow']",
}
LABELS = {"app.kubernetes.io/name": "holdfast"}
SHARED_MEMORY = "/dev/shm", "1Gi"  # noqa: S108 - where, and how much
_LIGHT = "500m", "2Gi"  # CPU and memory of a step that asks others to compute


@dataclass(frozen=True)
class Resources:
    """Limits equal requests, so that these pods are the last ones to be evicted."""

    cpu: str
    memory: str
    accelerator: str = ""  # the name of an extended resource, of which it takes one


def image_of(step: Step, spec: Spec, image: str | None) -> str:
    """The image of a step; on a share of an accelerator it is that accelerator's."""
    if step.accelerated and spec.cluster.slice is not None:
        return spec.cluster.image or training_image(spec.cluster.accelerator)
    return image or IMAGE


def resources_of(step: Step, spec: Spec) -> Resources:
    """What the pod of a step asks for."""
    steps, share = spec.cluster.steps, spec.cluster.slice
    accelerator = slice_resource(spec.cluster.accelerator, share) if step.accelerated and share is not None else ""
    return Resources(*((steps.cpu, steps.memory) if step.computes(spec) else _LIGHT), accelerator)


def environment_of(step: Step, spec: Spec) -> dict[str, str]:
    """The variables of a step, without the settings of the place, the fields of the pod and the secrets."""
    launcher = {"HOLDFAST_LAUNCHER": "kubernetes"} if step.launches else {}
    return {"HOLDFAST_LOG": "json", **launcher, **spec.cluster.environment}


def labels_of(step: Step) -> dict[str, str]:
    """The labels of the pod of a step."""
    return {**LABELS, "app.kubernetes.io/component": f"step-{step.name}"}
