"""What the pod of a step has on Argo: image, rights, environment, volumes, place and what it may cost.

Promises pods under the restricted Pod Security Standard, as the training job's own. It knows no scheduler and no
priority class: those belong to the training job, which the train step's launcher makes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from hera.workflows import ConfigMapEnvFrom, Env, FieldEnv, SecretEnvFrom
from hera.workflows.models import (
    Capabilities,
    EmptyDirVolumeSource,
    PersistentVolumeClaimVolumeSource,
    PodSecurityContext,
    ResourceRequirements,
    SeccompProfile,
    SecurityContext,
    Toleration,
    Volume,
    VolumeMount,
)

from holdfast.components.launch.accelerators import slice_resource, training_image
from holdfast.components.launch.emitters.pod import LEAVE_MARGIN, USER
from holdfast.components.runtime.shell import IMAGE
from holdfast.components.spec import Spec
from holdfast.pipelines.backends.kubeflow.platform import CPU, FIELDS, MEMORY, SETTINGS, WORKING

# Accounts of manifests/base: only the train step may make jobs.
STEP_ACCOUNT, LAUNCHER_ACCOUNT = "holdfast-step", "holdfast-launcher"
TEMPORARY = "/tmp"  # noqa: S108 - the one folder that may be written to


def image_of(step: str, spec: Spec, image: str | None) -> str:
    """The image of a step; evaluate on a share of an accelerator needs that accelerator's."""
    if step == "evaluate" and spec.cluster.slice is not None:
        return spec.cluster.image or training_image(spec.cluster.accelerator)
    return image or IMAGE


def pod_fields(step: str, spec: Spec) -> dict[str, Any]:
    """The fields of a Hera Container that the `cluster` section and the step decide."""
    cluster = spec.cluster
    fields: dict[str, Any] = {
        "env": _environment(step, spec),
        "env_from": [
            ConfigMapEnvFrom(name=SETTINGS, optional=True),
            *(SecretEnvFrom(name=secret) for secret in cluster.secrets),
        ],
        "resources": _resources(step, spec),
        "volume_mounts": _mounts(step, spec),
        "security_context": SecurityContext(
            allow_privilege_escalation=False,
            capabilities=Capabilities(drop=["ALL"]),
            read_only_root_filesystem=True,
        ),
        "image_pull_policy": "IfNotPresent",
        # The end of the log is what Argo says of a failed node.
        "termination_message_policy": "FallbackToLogsOnError",
        "labels": {"app.kubernetes.io/component": f"step-{step}"},
        "service_account_name": LAUNCHER_ACCOUNT if step == "train" else STEP_ACCOUNT,
    }
    if step == "train":  # it passes SIGTERM on, and the ranks save and leave
        grace = math.ceil(spec.checkpoint.grace_seconds) + 2 * LEAVE_MARGIN
        fields["pod_spec_patch"] = json.dumps({"terminationGracePeriodSeconds": grace})
    return fields


def security() -> PodSecurityContext:
    """Of every pod, Argo's own containers in it as well."""
    return PodSecurityContext(
        run_as_non_root=True,
        run_as_user=USER,
        run_as_group=USER,
        fs_group=USER,
        seccomp_profile=SeccompProfile(type="RuntimeDefault"),
    )


def tolerations(spec: Spec) -> list[Toleration] | None:
    """The taints that every pod accepts."""
    return [Toleration(**taint.model_dump(exclude_none=True)) for taint in spec.cluster.tolerations] or None


def volumes(spec: Spec) -> list[Volume]:
    """The volumes that pods may mount. A claim that is mounted twice is one volume."""
    claims = dict.fromkeys(volume.claim for volume in spec.cluster.volumes)
    return [
        Volume(name="temporary", empty_dir=EmptyDirVolumeSource()),
        Volume(name="shared-memory", empty_dir=EmptyDirVolumeSource(medium="Memory", size_limit="1Gi")),
        *(
            Volume(name=f"claim-{index}", persistent_volume_claim=PersistentVolumeClaimVolumeSource(claim_name=claim))
            for index, claim in enumerate(claims)
        ),
    ]


def _mounts(step: str, spec: Spec) -> list[VolumeMount]:
    claims = list(dict.fromkeys(volume.claim for volume in spec.cluster.volumes))
    mounts = [VolumeMount(name="temporary", mount_path=TEMPORARY)]
    if step == "preprocess":  # its processes pass blocks of text to each other
        mounts.append(VolumeMount(name="shared-memory", mount_path="/dev/shm"))  # noqa: S108
    return [
        *mounts,
        *(
            VolumeMount(
                name=f"claim-{claims.index(volume.claim)}", mount_path=volume.path, read_only=volume.read_only or None
            )
            for volume in spec.cluster.volumes
        ),
    ]


def _environment(step: str, spec: Spec) -> list[Env | FieldEnv]:
    values = {"HOLDFAST_LOG": "json", **spec.cluster.environment}
    if step == "train":
        values["HOLDFAST_LAUNCHER"] = "kubernetes"
    return [
        *(Env(name=name, value=value.replace("$(", "$$(")) for name, value in values.items()),
        *(FieldEnv(name=name, field_path=path) for name, path in FIELDS.items()),
    ]


def _resources(step: str, spec: Spec) -> ResourceRequirements:
    """Limits equal requests, so that these pods are the last ones to be evicted."""
    steps = spec.cluster.steps
    asked: dict[str, Any] = {"cpu": CPU, "memory": MEMORY}
    if step in WORKING or (step == "trigger" and spec.schedule.max_decay is not None):  # it tokenises and scores
        asked = {"cpu": steps.cpu, "memory": steps.memory}
    if step == "evaluate" and spec.cluster.slice is not None:
        asked[slice_resource(spec.cluster.accelerator, spec.cluster.slice)] = "1"
    return ResourceRequirements(requests=asked, limits=asked)
