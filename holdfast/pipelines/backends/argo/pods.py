"""Pods of the steps on Argo: rights, environment, volumes, placement and resources.

The pods meet the restricted Pod Security Standard, like those of the training job.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from hera.workflows import Env, FieldEnv
from hera.workflows.models import (
    Capabilities,
    EmptyDirVolumeSource,
    EnvFromSource,
    PersistentVolumeClaimVolumeSource,
    PodSecurityContext,
    ResourceRequirements,
    SeccompProfile,
    SecurityContext,
    Toleration,
    Volume,
    VolumeMount,
)

from holdfast.launch.emitters.pod import LEAVE_MARGIN, USER, sources
from holdfast.pipelines.backends.pods import (
    FIELDS,
    LABELS,
    SHARED_MEMORY,
    environment_of,
    image_of,
    labels_of,
    node_selector_of,
    resources_of,
    tolerations_of,
)
from holdfast.spec import Spec
from holdfast.spec.cluster import Toleration as Accepted
from holdfast.spec.engine_text import double_dollars, escape_environment, is_replaced_by_argo
from holdfast.steps import Step
from holdfast.steps.outcomes import EXIT_HANDLER

# Accounts of manifests/base. Only the train step may create jobs, and only the exit handler may end its leftover jobs.
STEP_ACCOUNT, LAUNCHER_ACCOUNT, NOTIFY_ACCOUNT = "holdfast-step", "holdfast-launcher", "holdfast-notify"
SERVING_ACCOUNT = "holdfast-serving"  # of manifests/components/kserve, for the step that writes the InferenceService
EXECUTOR_REQUESTS = {"cpu": "10m", "memory": "64Mi", "ephemeral-storage": "64Mi"}
EXECUTOR_LIMITS = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"}
TEMPORARY = "/tmp"  # noqa: S108 - the one folder that may be written to


def pod_fields(step: Step, spec: Spec, image: str | None) -> dict[str, Any]:
    """The fields of a Hera Container that depend on the `cluster` section and the step."""
    fields: dict[str, Any] = {
        "image": image_of(step, spec, image),
        "env": [
            *(Env(name=name, value=value) for name, value in _variables(step, spec).items()),
            *(FieldEnv(name=name, field_path=path) for name, path in FIELDS.items()),
        ],
        "env_from": [EnvFromSource.model_validate(source) for source in sources(spec.cluster)],
        "resources": _resources(step, spec),
        "volume_mounts": _mounts(step, spec),
        "security_context": SecurityContext(
            allow_privilege_escalation=False,
            capabilities=Capabilities(drop=["ALL"]),
            read_only_root_filesystem=True,
        ),
        "image_pull_policy": "IfNotPresent",
        # Argo shows the end of the log as the message of a failed node.
        "termination_message_policy": "FallbackToLogsOnError",
        "labels": {label: value for label, value in labels_of(step).items() if label not in LABELS},
        "node_selector": node_selector_of(step, spec) or None,
        "tolerations": tolerations(tolerations_of(step, spec)),
        "service_account_name": account_of(step, spec),
    }
    if step.launches:  # the step forwards SIGTERM, and the ranks save and exit
        grace = math.ceil(spec.checkpoint.grace_seconds) + 2 * LEAVE_MARGIN
        fields["pod_spec_patch"] = json.dumps({"terminationGracePeriodSeconds": grace})
    return fields


def _variables(step: Step, spec: Spec) -> dict[str, str]:
    """The variables of a step. Values that Argo would replace are escaped."""
    variables = environment_of(step, spec)
    plain = {name: value for name, value in variables.items() if not is_replaced_by_argo(value)}
    templated = {name: value for name, value in variables.items() if name not in plain}
    return {name: double_dollars(value) for name, value in plain.items()} | escape_environment(templated)


def account_of(step: Step, spec: Spec) -> str:
    """The service account with exactly the rights of the step."""
    if step.launches:
        return LAUNCHER_ACCOUNT
    if step.name == EXIT_HANDLER:
        return NOTIFY_ACCOUNT
    on_cluster = spec.serving.kserve is not None or spec.serving.deployment is not None
    return SERVING_ACCOUNT if step.serves and on_cluster else STEP_ACCOUNT


def security() -> PodSecurityContext:
    """The security context of every pod, including Argo's own containers."""
    return PodSecurityContext(
        run_as_non_root=True,
        run_as_user=USER,
        run_as_group=USER,
        fs_group=USER,
        seccomp_profile=SeccompProfile(type="RuntimeDefault"),
    )


def executor_patch() -> str:
    """A patch of every pod that makes Argo's own containers fit the restricted standard and a quota.

    Argo gives them no security context unless its controller's configuration names one (argoproj/argo-workflows:
    workflow/controller/workflowpod.go, newExecContainer), and no resources.
    """
    fields = {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "resources": {"requests": EXECUTOR_REQUESTS, "limits": EXECUTOR_LIMITS},
    }
    return json.dumps({"initContainers": [{"name": "init", **fields}], "containers": [{"name": "wait", **fields}]})


def tolerations(taints: Sequence[Accepted]) -> list[Toleration] | None:
    """Taints that pods tolerate, as Argo's objects."""
    return [Toleration(**taint.model_dump(exclude_none=True)) for taint in taints] or None


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
    quantities: dict[str, Any] = {
        "cpu": resources.cpu,
        "memory": resources.memory,
        "ephemeral-storage": resources.ephemeral_storage,
    }
    if resources.accelerator:
        quantities[resources.accelerator] = str(resources.accelerators)
    return ResourceRequirements(requests=quantities, limits=quantities)
