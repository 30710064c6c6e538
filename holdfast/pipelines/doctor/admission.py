"""Checks that the API server admits a run's pods, and that a policy limits their service accounts, by dry runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.launch.emitters import objects_for, training_job
from holdfast.launch.kubernetes.api_errors import POD_ACCOUNTS
from holdfast.launch.kubernetes.kinds import KINDS
from holdfast.launch.kubernetes.owner import WORKFLOW_LABEL
from holdfast.pipelines.doctor.cluster import LAUNCHERS, RANK_ACCOUNT, SERVICE_ACCOUNTS, Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.serving.pods import placement_of, resources_of
from holdfast.spec import Spec
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.spec.operations import Kserve
from holdfast.steps.runner import IMAGE

# Check that the API server admits the pods of a run, by a dry run for a rank and for a step.
#
# It covers admission: pod security of the namespace, quotas and limits, service accounts, priority classes, and the
# fields. Nothing is created.

POD_ADMISSION_CHECK = "pod admission"
KSERVE_LABEL = "serving.kserve.io/inferenceservice"


def check_pod_admission(cluster: Cluster) -> Iterator[Finding]:
    """One finding for a rank, one for the launcher's pod as Argo would create it, and one for the pod of an
    InferenceService that the spec gives an account."""
    if cluster.spec is None:
        return
    rank = DryRun("a rank", rank_pod(cluster.spec), KINDS[cluster.job].label, cluster.namespace)
    step = DryRun("the step train", step_pod(cluster.spec, cluster.launcher), WORKFLOW_LABEL, cluster.namespace)
    tries = [rank, step]
    kserve = cluster.spec.serving.kserve
    if kserve is not None and kserve.service_account:
        pod = serving_pod(cluster.spec, kserve)
        namespace = kserve.namespace or cluster.namespace
        tries.append(DryRun("an InferenceService", pod, KSERVE_LABEL, namespace, "serving.kserve.service_account"))
    for dry_run in tries:
        if refusal := _refusal(cluster, dry_run):
            yield _refused(cluster, dry_run, refusal)
        else:
            yield Finding(POD_ADMISSION_CHECK, "ok", f"{dry_run.namespace} takes the pod of {dry_run.owner}")


@dataclass(frozen=True)
class DryRun:
    """A pod for the API server to judge."""

    owner: str
    pod: dict[str, Any]
    label: str  # of the pod's controller
    namespace: str
    field: str = "cluster.service_account"  # of the spec, which names the account


def _refusal(cluster: Cluster, dry_run: DryRun) -> str:
    """Why the API server refuses the pod; empty if it admits it."""
    path = f"/api/v1/namespaces/{dry_run.namespace}/pods?dryRun=All&fieldValidation=Strict"
    metadata = dry_run.pod["metadata"]
    labels = {**metadata.get("labels", {}), dry_run.label: "doctor"}
    body = {**dry_run.pod, "metadata": {**metadata, "namespace": dry_run.namespace, "labels": labels}}
    try:
        cluster.api.ask(path, body)
    except HoldfastError as error:
        return str(error) or "no reason given"
    return ""


def _refused(cluster: Cluster, dry_run: DryRun, message: str) -> Finding:
    what, namespace = dry_run.owner, dry_run.namespace
    if "violates PodSecurity" in message:
        level = message.partition("violates PodSecurity")[2].split('"')[1]
        added = cluster.spec.cluster.capabilities if cluster.spec else ()
        # The level `baseline` allows none of the added capabilities.
        needed_level = "privileged" if any(f'"{name}"' in message for name in added) else "baseline"
        remedy = (
            f"what the spec adds does not fit the level {level}: remove it, or kubectl label namespace "
            f"{namespace} pod-security.kubernetes.io/enforce={needed_level} --overwrite"
        )
    elif "exceeded quota" in message or "must specify" in message:
        remedy = f"kubectl describe -n {namespace} resourcequota,limitrange; ask for less, or raise it"
    elif "serviceaccount" in message and "not found" in message:
        remedy = (
            f"kubectl apply -n {namespace} -f {SERVICE_ACCOUNTS}, or name an account of "
            f"kubectl get serviceaccounts -n {namespace}"
        )
    elif POD_ACCOUNTS in message:
        remedy = f"allow the account as the message says, or name another one in {dry_run.field}"
    elif "cannot create resource" in message:
        return Finding(
            POD_ADMISSION_CHECK,
            "warn",
            f"could not ask for {what}: {message}",
            "ask an administrator to run this command",
        )
    else:
        remedy = "change the field it names"
    return Finding(
        POD_ADMISSION_CHECK, "fail", f"the pod of {what} is refused: {message}", remedy, ExitCode.UNSCHEDULABLE
    )


# Check that an admission policy limits the service accounts of Workflows, by dry runs of pods that it refuses.
#
# Only where steps run as the accounts of the manifests: KFP chooses the accounts of its steps.

ACCOUNT_POLICY_CHECK = "account policy"
OTHER_ACCOUNTS = (RANK_ACCOUNT, "default")  # every namespace has the second one; the annotation may allow either


def check_account_policy(cluster: Cluster) -> Iterator[Finding]:
    """One finding: a warning if a Workflow may run a pod as an account that no step has, or if no dry run shows it."""
    if cluster.spec is None or cluster.launcher != LAUNCHERS[0]:
        return
    refusals = {
        account: _refusal(cluster, DryRun("a step", step_pod(cluster.spec, account), WORKFLOW_LABEL, cluster.namespace))
        for account in OTHER_ACCOUNTS
    }
    if any(POD_ACCOUNTS in refusal for refusal in refusals.values()):
        message = f"the policy {POD_ACCOUNTS} limits the service accounts of Workflows in {cluster.namespace}"
        yield Finding(ACCOUNT_POLICY_CHECK, "ok", message)
    elif admitted := [account for account, refusal in refusals.items() if not refusal]:
        message = (
            f"a Workflow in {cluster.namespace} may run a pod as {' or '.join(admitted)}, the accounts of no step: no "
            "policy limits it, or the annotation holdfast/further-service-accounts of the namespace allows it"
        )
        remedy = "list manifests/components/account-policy in the overlay and apply it (Kubernetes 1.30 or newer)"
        yield Finding(ACCOUNT_POLICY_CHECK, "warn", message, remedy)
    else:
        message = (
            f"whether a policy limits the service accounts of Workflows could not be checked: {refusals['default']}"
        )
        yield Finding(ACCOUNT_POLICY_CHECK, "warn", message, "change what the API server refuses, and run this again")


def rank_pod(spec: Spec) -> dict[str, Any]:
    """A pod of the training job, from the launcher's object."""
    job = objects_for(training_job(spec, "doctor", 1, spec.store or "s3://bucket/prefix"))
    template = _template(job)
    return _pod("holdfast-doctor-rank", template.get("metadata", {}), template["spec"])


def _template(node: Any) -> dict[str, Any]:
    """The first pod template below `node`."""
    waiting = [node]
    while waiting:
        item = waiting.pop(0)
        if isinstance(item, dict):
            inner = item.get("template")
            if isinstance(inner, dict) and "containers" in inner.get("spec", {}):
                return inner
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    raise AssertionError("the training job has no pods")


def step_pod(spec: Spec, account: str) -> dict[str, Any]:
    """The train step's pod, from Argo's template, with the account that steps have there."""
    from holdfast.pipelines.backends.argo import argo_objects

    workflow = argo_objects(spec)[0]["spec"]
    step = next(template for template in workflow["templates"] if template["name"] == "train")
    spec_of_pod = {
        "containers": [{"name": "main", **step["container"]}],
        "restartPolicy": "Never",
        "securityContext": workflow["securityContext"],
        "serviceAccountName": account,
        "volumes": [*workflow["volumes"], *step.get("volumes", [])],
    }
    for name in ("nodeSelector", "tolerations"):
        if value := step.get(name) or workflow.get(name):
            spec_of_pod[name] = value
    return _pod("holdfast-doctor-step", step.get("metadata", {}), spec_of_pod)


def serving_pod(spec: Spec, settings: Kserve) -> dict[str, Any]:
    """A pod with the account, the node and the resources of the InferenceService; KServe chooses its container."""
    container = {
        "name": "kserve-container",
        "image": IMAGE,
        "resources": resources_of(spec, settings),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    context = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return _pod(
        "holdfast-doctor-model",
        {},
        {"containers": [container], "securityContext": context, **placement_of(spec, settings)},
    )


def _pod(name: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    selected = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **selected}, "spec": spec}
