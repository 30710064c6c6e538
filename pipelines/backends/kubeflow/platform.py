"""What the pods of the pipeline's steps look like on Kubernetes: the second document of the compiled file.

Promises that everything which kfp-kubernetes can express of the `cluster` section reaches every step. It knows no
scheduler and no priority class: those belong to the training job, which the train step's launcher makes.
"""

import re

from kfp import dsl, kubernetes
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.components.runtime.outcomes import POD
from holdfast.components.runtime.shell import SECRETS
from holdfast.components.spec import Spec
from holdfast.components.spec.cluster import amount

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
WORKING = ("preprocess", "evaluate")  # the steps that compute in their own pod
CPU, MEMORY = "500m", "2Gi"  # of the other ones
_KFP_MEMORY = re.compile(r"[0-9]+([KMGTP]i?)?")


def pipeline_config(spec: Spec) -> dsl.PipelineConfig:
    """How long the run's workflow and its pods are kept."""
    return dsl.PipelineConfig(ttl_seconds_after_finished=min(int(spec.cluster.keep_minutes * 60), 2**31 - 1))


def place(task: PipelineTask, step: str, spec: Spec) -> PipelineTask:
    """Give the pod of `step` its resources, environment, secrets, volumes and place."""
    cluster = spec.cluster
    _resources(task, step, spec)
    own = {"HOLDFAST_LOG": "json"} | ({"HOLDFAST_LAUNCHER": "kubernetes"} if step == "train" else {})
    for name, value in {**own, **cluster.environment}.items():
        task.set_env_variable(name, value)
    settings = {key: key for key in SETTINGS_KEYS if key not in cluster.environment}
    kubernetes.use_config_map_as_env(task, SETTINGS, settings, optional=True)
    for name, path in FIELDS.items():
        kubernetes.use_field_path_as_env(task, name, path)
    for secret in cluster.secrets:  # whole: which keys a Secret has is not known here
        kubernetes.use_secret_as_volume(task, secret, f"{SECRETS}/{secret}")
    for volume in cluster.volumes:
        kubernetes.mount_pvc(task, volume.claim, volume.path)
    for label, value in cluster.node_selector.items():
        kubernetes.add_node_selector(task, label, value)
    for taint in cluster.tolerations:
        kubernetes.add_toleration(task, taint.key, taint.operator, taint.value, taint.effect)
    if cluster.pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(cluster.pull_secrets))
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    kubernetes.set_security_context(task, run_as_non_root=True)
    kubernetes.add_pod_label(task, "app.kubernetes.io/name", "holdfast")
    kubernetes.add_pod_label(task, "app.kubernetes.io/component", f"step-{step}")
    return task


def _resources(task: PipelineTask, step: str, spec: Spec) -> None:
    """Limits equal requests, so that these pods are the last ones to be evicted."""
    steps = spec.cluster.steps
    works = step in WORKING or (step == "trigger" and spec.schedule.max_decay is not None)  # which scores the champion
    cpu, memory = (steps.cpu, _memory(steps.memory)) if works else (CPU, MEMORY)
    cpu = cpu if cpu.endswith("m") or not cpu[-1].isalpha() else str(amount(cpu))
    task.set_cpu_request(cpu).set_cpu_limit(cpu).set_memory_request(memory).set_memory_limit(memory)
    if step == "preprocess":  # its processes pass blocks of text to each other
        kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit="1Gi")  # noqa: S108
    if step == "evaluate" and spec.cluster.slice is not None:
        from holdfast.components.launch.accelerators import slice_resource, training_image

        task.set_accelerator_type(slice_resource(spec.cluster.accelerator, spec.cluster.slice)).set_accelerator_limit(1)
        task.set_container_image(spec.cluster.image or training_image(spec.cluster.accelerator))


def _memory(quantity: str) -> str:
    """A quantity in the words that KFP takes, which has no fractions and no `k`."""
    return quantity if _KFP_MEMORY.fullmatch(quantity) else str(int(amount(quantity)))
