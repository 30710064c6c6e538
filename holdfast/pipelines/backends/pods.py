"""Pods of the steps on any cluster: image, resources, environment and the location of settings.

Schedulers and priority classes are not covered: they belong to the training job, which the train step's launcher makes.
"""

from dataclasses import dataclass

from holdfast.launch.accelerators import ACCELERATORS, slice_resource, taint_of, training_image
from holdfast.launch.emitters.pod import POD_FIELDS
from holdfast.runtime.environment import CACHE_VARIABLE, cache_gib
from holdfast.spec import Spec
from holdfast.spec.cluster import EvaluatePod, StepPod, Toleration
from holdfast.spec.engine_text import is_replaced_by_argo
from holdfast.spec.errors import Problem, SpecError
from holdfast.steps import Step
from holdfast.steps.runner import IMAGE

# Fields that the train step's launcher needs to own the training job for the pipeline run, and to find it again.
FIELDS = {**POD_FIELDS, "HOLDFAST_WORKFLOW": "metadata.labels['workflows.argoproj.io/workflow']"}
LABELS = {"app.kubernetes.io/name": "holdfast"}
SHARED_MEMORY = "/dev/shm", "1Gi"  # noqa: S108 - where, and how much


@dataclass(frozen=True)
class Resources:
    """Resources of a pod. Limits equal requests, so these pods are evicted last."""

    cpu: str
    memory: str
    ephemeral_storage: str
    accelerator: str = ""  # name of an extended resource...
    accelerators: int = 0  # ...and its count


def require_no_templates(spec: Spec) -> None:
    """Raise SpecError for texts in a step's pod that Argo, and so KFP, would replace or fail on.

    This covers texts that no step reads, so no step can restore them (`holdfast.spec.engine_text`).
    """
    steps = spec.cluster.steps
    texts = {f"cluster.steps.annotations.{name}": value for name, value in steps.annotations.items()}
    texts |= {f"cluster.volumes.{number}.path": volume.path for number, volume in enumerate(spec.cluster.volumes)}
    texts["cluster.image"] = spec.cluster.image or ""
    remedy = "write it without {{ and without unprintable characters"
    message = "would be changed by Argo, which replaces what stands between {{ and }} in the pods of steps"
    if problems := [Problem(name, text, message, remedy) for name, text in texts.items() if is_replaced_by_argo(text)]:
        raise SpecError(problems, "spec, for Argo or Kubeflow")


def pod_of(step: Step, spec: Spec) -> StepPod:
    """The spec's settings for the pod of a step."""
    pod: StepPod = getattr(spec.cluster.steps, "evaluate" if step.scores(spec) else step.pod or step.name)
    return pod


def image_of(step: Step, spec: Spec, image: str | None) -> str:
    """The image of a step; with an accelerator or a share of one, the image for that accelerator."""
    if resources_of(step, spec).accelerator:
        return spec.cluster.image or training_image(spec.cluster.accelerator)
    return image or IMAGE


def resources_of(step: Step, spec: Spec) -> Resources:
    """The resource requests of a step's pod."""
    pod, cluster = pod_of(step, spec), spec.cluster
    accelerator, count = "", pod.accelerators if isinstance(pod, EvaluatePod) else 0
    if count:
        accelerator = ACCELERATORS[cluster.accelerator].resource or ""
    elif isinstance(pod, EvaluatePod) and cluster.slice is not None:
        accelerator, count = slice_resource(cluster.accelerator, cluster.slice), 1
    return Resources(pod.cpu, pod.memory, pod.ephemeral_storage, accelerator, count)


def node_selector_of(step: Step, spec: Spec) -> dict[str, str]:
    """The required node labels of a step: those of all steps, and its specific ones."""
    return {**spec.cluster.steps.node_selector, **pod_of(step, spec).node_selector}


def tolerations_of(step: Step, spec: Spec) -> list[Toleration]:
    """The tolerations of a step's pod: those of all steps, its specific ones, and that of its accelerator's nodes."""
    tolerations = [*spec.cluster.steps.tolerations, *pod_of(step, spec).tolerations]
    if resources_of(step, spec).accelerator:
        tolerations.append(taint_of(spec.cluster.accelerator))
    return tolerations


def environment_of(step: Step, spec: Spec) -> dict[str, str]:
    """The variables of a step, without the cluster's settings, the fields of the pod and the secrets."""
    launcher = {"HOLDFAST_LAUNCHER": "kubernetes"} if step.launches else {}
    cache = {CACHE_VARIABLE: cache_gib(pod_of(step, spec).ephemeral_storage)}
    return {"HOLDFAST_LOG": "json", **cache, **launcher, **spec.cluster.environment}


def labels_of(step: Step) -> dict[str, str]:
    """The labels of a step's pod, without those that the spec gives to all."""
    return {**LABELS, "app.kubernetes.io/component": f"step-{step.name}"}
