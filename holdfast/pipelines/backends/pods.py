"""What the pod of a step has, whichever system makes it: image, resources, environment, and where its settings are.

It knows no scheduler and no priority class: those belong to the training job, which the train step's launcher makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.launch.accelerators import ACCELERATORS, slice_resource, taint_of, training_image
from holdfast.launch.emitters.pod import POD_FIELDS
from holdfast.runtime.environment import CACHE_VARIABLE, cache_gib
from holdfast.runtime.step_runner import IMAGE
from holdfast.spec import Spec
from holdfast.spec.cluster import EvaluatePod, StepPod, Toleration
from holdfast.spec.engine_text import is_replaced_by_argo
from holdfast.spec.errors import Problem, SpecError
from holdfast.steps import Step

# What the train step's launcher needs to own the training job on behalf of the pipeline run, and to find it again.
FIELDS = {**POD_FIELDS, "HOLDFAST_WORKFLOW": "metadata.labels['workflows.argoproj.io/workflow']"}
LABELS = {"app.kubernetes.io/name": "holdfast"}
SHARED_MEMORY = "/dev/shm", "1Gi"  # noqa: S108 - where, and how much


@dataclass(frozen=True)
class Resources:
    """Limits equal requests, so that these pods are the last ones to be evicted."""

    cpu: str
    memory: str
    ephemeral_storage: str
    accelerator: str = ""  # the name of an extended resource...
    accelerators: int = 0  # ...and how many of it


def require_no_templates(spec: Spec) -> None:
    """Raise SpecError for texts that Argo, and with it KFP, would replace or fail on in a pod of a step, and that no
    step reads, so that none can restore them (`holdfast.spec.engine_text`)."""
    steps = spec.cluster.steps
    texts = {f"cluster.steps.annotations.{name}": value for name, value in steps.annotations.items()}
    texts |= {f"cluster.volumes.{number}.path": one.path for number, one in enumerate(spec.cluster.volumes)}
    texts["cluster.image"] = spec.cluster.image or ""
    remedy = "write it without {{ and without unprintable characters"
    message = "would be changed by Argo, which replaces what stands between {{ and }} in the pods of steps"
    if found := [Problem(name, text, message, remedy) for name, text in texts.items() if is_replaced_by_argo(text)]:
        raise SpecError(found, "spec, for Argo or Kubeflow")


def pod_of(step: Step, spec: Spec) -> StepPod:
    """What the spec says of the pod of a step."""
    found: StepPod = getattr(spec.cluster.steps, "evaluate" if step.scores(spec) else step.pod or step.name)
    return found


def image_of(step: Step, spec: Spec, image: str | None) -> str:
    """The image of a step; on an accelerator, or a share of one, it is that accelerator's."""
    if resources_of(step, spec).accelerator:
        return spec.cluster.image or training_image(spec.cluster.accelerator)
    return image or IMAGE


def resources_of(step: Step, spec: Spec) -> Resources:
    """What the pod of a step asks for."""
    pod, cluster = pod_of(step, spec), spec.cluster
    accelerator, count = "", pod.accelerators if isinstance(pod, EvaluatePod) else 0
    if count:
        accelerator = ACCELERATORS[cluster.accelerator].resource or ""
    elif isinstance(pod, EvaluatePod) and cluster.slice is not None:
        accelerator, count = slice_resource(cluster.accelerator, cluster.slice), 1
    return Resources(pod.cpu, pod.memory, pod.ephemeral_storage, accelerator, count)


def node_selector_of(step: Step, spec: Spec) -> dict[str, str]:
    """The labels that the node of a step must have: those of all steps, and its own."""
    return {**spec.cluster.steps.node_selector, **pod_of(step, spec).node_selector}


def tolerations_of(step: Step, spec: Spec) -> list[Toleration]:
    """The taints that the pod of a step accepts: those of all steps, its own, and that of nodes with the accelerator
    which it was given."""
    found = [*spec.cluster.steps.tolerations, *pod_of(step, spec).tolerations]
    if resources_of(step, spec).accelerator:
        found.append(taint_of(spec.cluster.accelerator))
    return found


def environment_of(step: Step, spec: Spec) -> dict[str, str]:
    """The variables of a step, without the settings of the place, the fields of the pod and the secrets."""
    launcher = {"HOLDFAST_LAUNCHER": "kubernetes"} if step.launches else {}
    cache = {CACHE_VARIABLE: cache_gib(pod_of(step, spec).ephemeral_storage)}
    return {"HOLDFAST_LOG": "json", **cache, **launcher, **spec.cluster.environment}


def labels_of(step: Step) -> dict[str, str]:
    """The labels of the pod of a step, without those that the spec gives to all."""
    return {**LABELS, "app.kubernetes.io/component": f"step-{step.name}"}
