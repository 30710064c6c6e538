"""Kubernetes configuration of the steps' pods: the second document of the compiled file.

Everything in the `cluster` section that kfp-kubernetes can express reaches every step. kfp-kubernetes has no field for
ephemeral storage: that value bounds the cache of the datasets, and nothing is requested.
"""

import re

from kfp import dsl, kubernetes
from kfp.dsl.pipeline_task import PipelineTask

from holdfast.pipelines.backends.pods import (
    FIELDS,
    SHARED_MEMORY,
    environment_of,
    image_of,
    labels_of,
    node_selector_of,
    resources_of,
    tolerations_of,
)
from holdfast.spec import Spec
from holdfast.spec.cluster import SECRETS, amount
from holdfast.spec.engine_text import escape_environment
from holdfast.steps import ARTIFACTS, PLACE, Step
from holdfast.steps.outcomes import EXIT_HANDLER
from holdfast.steps.runner import IMAGE, MOUNTED_SECRETS, MOUNTED_SETTINGS

_KFP_MEMORY = re.compile(r"[0-9]+([KMGTP]i?)?")


def pipeline_config(spec: Spec) -> dsl.PipelineConfig:
    """The retention of the run's workflow and its pods."""
    return dsl.PipelineConfig(ttl_seconds_after_finished=min(int(spec.cluster.ttl_minutes * 60), 2**31 - 1))


def place(task: PipelineTask, step: Step, spec: Spec, image: str | None) -> PipelineTask:
    """Give the pod of `step` its image, resources, environment, secrets, volumes and placement."""
    cluster = spec.cluster
    task.set_container_image(image_of(step, spec, image))
    _resources(task, step, spec)
    for name, value in escape_environment(environment_of(step, spec)).items():
        task.set_env_variable(name, value)
    for name, path in FIELDS.items():
        kubernetes.use_field_path_as_env(task, name, path)
    if cluster.settings:  # mounted whole, like the Secrets, because their keys are unknown here
        kubernetes.use_config_map_as_volume(task, cluster.settings, f"{MOUNTED_SETTINGS}/{cluster.settings}", True)
    for secret in cluster.secrets:
        kubernetes.use_secret_as_volume(task, secret, f"{MOUNTED_SECRETS}/{secret}", secret == SECRETS)
    for volume in cluster.volumes:
        kubernetes.mount_pvc(task, volume.claim, volume.path)
    for label, value in node_selector_of(step, spec).items():
        kubernetes.add_node_selector(task, label, value)
    for taint in tolerations_of(step, spec):
        kubernetes.add_toleration(task, taint.key, taint.operator, taint.value, taint.effect)
    if cluster.pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(cluster.pull_secrets))
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    kubernetes.set_security_context(task, run_as_non_root=True)
    for label, value in {**cluster.steps.labels, **labels_of(step)}.items():
        kubernetes.add_pod_label(task, label, value)
    for key, value in cluster.steps.annotations.items():
        kubernetes.add_pod_annotation(task, key, value)
    return task


def _resources(task: PipelineTask, step: Step, spec: Spec) -> None:
    resources = resources_of(step, spec)
    cpu = (
        resources.cpu if resources.cpu.endswith("m") or not resources.cpu[-1].isalpha() else str(amount(resources.cpu))
    )
    memory = _memory(resources.memory)
    task.set_cpu_request(cpu).set_cpu_limit(cpu).set_memory_request(memory).set_memory_limit(memory)
    if step.shared_memory:
        path, size = SHARED_MEMORY
        kubernetes.empty_dir_mount(task, "shm", path, medium="Memory", size_limit=size)
    if resources.accelerator:
        task.set_accelerator_type(resources.accelerator).set_accelerator_limit(resources.accelerators)


def _memory(quantity: str) -> str:
    """A quantity in KFP's notation, which has no fractions and no `k`."""
    return quantity if _KFP_MEMORY.fullmatch(quantity) else str(int(amount(quantity)))


# The dataset and the model as KFP artifacts with their own addresses in the bucket.
#
# A step's output cannot have such an address: KFP's launcher uploads it, and refuses one outside the pipeline's root.
# An importer only enters the address. It reads the address from an input of the DAG that contains it, never from
# another task. Unlike a container's launcher, it never reports to a DAG that it has ended.
#
# So the importers stand in a condition, which is a DAG with inputs. A container after them ends that DAG; without it
# the UI would show the group as running forever. A folder has no address that KFP accepts: the condition is false, and
# the step's own artifact names the folder. On one machine there is no UI, and nothing of this runs. Sources:
# docs/kubeflow.md.

SCHEME, URI = PLACE
IN_A_BUCKET = "s3"
SHOW = Step(ARTIFACTS, "Say where the dataset and the model are.", pod=EXIT_HANDLER)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def artifacts(dataset: str, model: str, addresses: dsl.Output[dsl.Markdown]) -> None:
    """Say where the dataset and the model are."""
    with open(addresses.path, "w", encoding="utf-8") as file:  # noqa: PTH123 - KFP carries these lines, no import
        file.write(f"- dataset: `{dataset}`\n- model: `{model}`\n")


def show_artifacts(preprocess: PipelineTask, train: PipelineTask, spec: Spec, image: str | None) -> None:
    """Enter the outputs of the two tasks as artifacts, in parallel to the rest of the pipeline."""
    with dsl.If(train.outputs[SCHEME] == IN_A_BUCKET, name=f"if-in-{IN_A_BUCKET}"):
        uris = {"dataset": preprocess.outputs[URI], "model": train.outputs[URI]}
        kinds = {"dataset": dsl.Dataset, "model": dsl.Model}
        importers = [
            dsl.importer(artifact_uri=uri, artifact_class=kinds[name], reimport=False).set_display_name(name)
            for name, uri in uris.items()
        ]
        task = artifacts(**uris).after(*importers)
        task.set_caching_options(enable_caching=False)
        place(task, SHOW, spec, image)
