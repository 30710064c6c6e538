"""What the pods of the pipeline's steps look like on Kubernetes: the second document of the compiled file.

Promises that everything which kfp-kubernetes can express of the `cluster` section reaches every step.
"""

import re

from kfp import dsl, kubernetes
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.components.runtime.shell import SECRETS
from holdfast.components.spec import Spec
from holdfast.components.spec.cluster import amount
from holdfast.components.steps import Step
from holdfast.pipelines.backends.pods import (
    FIELDS,
    SETTINGS,
    SETTINGS_KEYS,
    SHARED_MEMORY,
    environment_of,
    image_of,
    labels_of,
    resources_of,
)

_KFP_MEMORY = re.compile(r"[0-9]+([KMGTP]i?)?")


def pipeline_config(spec: Spec) -> dsl.PipelineConfig:
    """How long the run's workflow and its pods are kept."""
    return dsl.PipelineConfig(ttl_seconds_after_finished=min(int(spec.cluster.keep_minutes * 60), 2**31 - 1))


def place(task: PipelineTask, step: Step, spec: Spec, image: str | None) -> PipelineTask:
    """Give the pod of `step` its image, resources, environment, secrets, volumes and place."""
    cluster = spec.cluster
    task.set_container_image(image_of(step, spec, image))
    _resources(task, step, spec)
    for name, value in environment_of(step, spec).items():
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
    for label, value in labels_of(step).items():
        kubernetes.add_pod_label(task, label, value)
    return task


def _resources(task: PipelineTask, step: Step, spec: Spec) -> None:
    asked = resources_of(step, spec)
    cpu = asked.cpu if asked.cpu.endswith("m") or not asked.cpu[-1].isalpha() else str(amount(asked.cpu))
    memory = _memory(asked.memory)
    task.set_cpu_request(cpu).set_cpu_limit(cpu).set_memory_request(memory).set_memory_limit(memory)
    if step.shared_memory:
        path, size = SHARED_MEMORY
        kubernetes.empty_dir_mount(task, "shm", path, medium="Memory", size_limit=size)
    if asked.accelerator:
        task.set_accelerator_type(asked.accelerator).set_accelerator_limit(1)


def _memory(quantity: str) -> str:
    """A quantity in the words that KFP takes, which has no fractions and no `k`."""
    return quantity if _KFP_MEMORY.fullmatch(quantity) else str(int(amount(quantity)))
