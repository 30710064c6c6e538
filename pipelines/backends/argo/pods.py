"""What the pod of a step has on Argo: rights, environment, volumes, place and what it may cost.

Promises pods under the restricted Pod Security Standard, as the training job's own.
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

from holdfast.components.launch.emitters.pod import LEAVE_MARGIN, USER
from holdfast.components.spec import Spec
from holdfast.components.steps import Step
from holdfast.pipelines.backends.pods import (
    FIELDS,
    LABELS,
    SETTINGS,
    SHARED_MEMORY,
    environment_of,
    image_of,
    labels_of,
    resources_of,
)

# Accounts of manifests/base: only the train step may make jobs.
STEP_ACCOUNT, LAUNCHER_ACCOUNT = "holdfast-step", "holdfast-launcher"
TEMPORARY = "/tmp"  # noqa: S108 - the one folder that may be written to


def pod_fields(step: Step, spec: Spec, image: str | None) -> dict[str, Any]:
    """The fields of a Hera Container that the `cluster` section and the step decide."""
    fields: dict[str, Any] = {
        "image": image_of(step, spec, image),
        "env": [
            *(Env(name=name, value=value.replace("$(", "$$(")) for name, value in environment_of(step, spec).items()),
            *(FieldEnv(name=name, field_path=path) for name, path in FIELDS.items()),
        ],
        "env_from": [
            ConfigMapEnvFrom(name=SETTINGS, optional=True),
            *(SecretEnvFrom(name=secret) for secret in spec.cluster.secrets),
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
        "labels": {label: value for label, value in labels_of(step).items() if label not in LABELS},
        "service_account_name": LAUNCHER_ACCOUNT if step.launches else STEP_ACCOUNT,
    }
    if step.launches:  # it passes SIGTERM on, and the ranks save and leave
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
        Volume(name="shared-memory", empty_dir=EmptyDirVolumeSource(medium="Memory", size_limit=SHARED_MEMORY[1])),
        *(
            Volume(name=f"claim-{index}", persistent_volume_claim=PersistentVolumeClaimVolumeSource(claim_name=claim))
            for index, claim in enumerate(claims)
        ),
    ]


def _mounts(step: Step, spec: Spec) -> list[VolumeMount]:
    claims = list(dict.fromkeys(volume.claim for volume in spec.cluster.volumes))
    mounts = [VolumeMount(name="temporary", mount_path=TEMPORARY)]
    if step.shared_memory:
        mounts.append(VolumeMount(name="shared-memory", mount_path=SHARED_MEMORY[0]))
    return [
        *mounts,
        *(
            VolumeMount(
                name=f"claim-{claims.index(volume.claim)}", mount_path=volume.path, read_only=volume.read_only or None
            )
            for volume in spec.cluster.volumes
        ),
    ]


def _resources(step: Step, spec: Spec) -> ResourceRequirements:
    resources = resources_of(step, spec)
    asked: dict[str, Any] = {"cpu": resources.cpu, "memory": resources.memory}
    if resources.accelerator:
        asked[resources.accelerator] = "1"
    return ResourceRequirements(requests=asked, limits=asked)
