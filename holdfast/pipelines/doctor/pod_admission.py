"""Check that the API server admits the pods of a run, by a dry run for a rank and for a step.

It covers admission: pod security of the namespace, quotas and limits, service accounts, priority classes, and the
fields. Nothing is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.launch.emitters import objects_for, training_job
from holdfast.pipelines.doctor.cluster import SERVICE_ACCOUNTS, Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec import Spec
from holdfast.spec.errors import ExitCode, HoldfastError

NAME = "pod admission"


def check(cluster: Cluster) -> Iterator[Finding]:
    """One finding for a rank, and one for the launcher's pod as Argo would create it."""
    if cluster.spec is None:
        return
    for what, pod in (("a rank", rank_pod(cluster.spec)), ("the step train", step_pod(cluster.spec, cluster.launcher))):
        path = f"/api/v1/namespaces/{cluster.namespace}/pods?dryRun=All&fieldValidation=Strict"
        pod["metadata"]["namespace"] = cluster.namespace
        try:
            cluster.api.ask(path, pod)
        except HoldfastError as error:
            yield _refused(cluster, what, str(error))
        else:
            yield Finding(NAME, "ok", f"{cluster.namespace} takes the pod of {what}")


def _refused(cluster: Cluster, what: str, said: str) -> Finding:
    if "violates PodSecurity" in said:
        level = said.partition("violates PodSecurity")[2].split('"')[1]
        named = cluster.spec.cluster.capabilities if cluster.spec else ()
        needed = "privileged" if any(f'"{one}"' in said for one in named) else "baseline"  # which allows none of them
        remedy = (
            f"what the spec adds does not fit the level {level}: remove it, or kubectl label namespace "
            f"{cluster.namespace} pod-security.kubernetes.io/enforce={needed} --overwrite"
        )
    elif "exceeded quota" in said or "must specify" in said:
        remedy = f"kubectl describe -n {cluster.namespace} resourcequota,limitrange; ask for less, or raise it"
    elif "serviceaccount" in said and "not found" in said:
        remedy = (
            f"kubectl apply -n {cluster.namespace} -f {SERVICE_ACCOUNTS}, or name an account of "
            f"kubectl get serviceaccounts -n {cluster.namespace}"
        )
    elif "cannot create resource" in said:
        return Finding(NAME, "warn", f"could not ask for {what}: {said}", "ask an administrator to run this command")
    else:
        remedy = "change the field it names"
    return Finding(NAME, "fail", f"the pod of {what} is refused: {said}", remedy, ExitCode.UNSCHEDULABLE)


def rank_pod(spec: Spec) -> dict[str, Any]:
    """A pod of the training job, from the launcher's object."""
    job = objects_for(training_job(spec, "doctor", 1, spec.store or "s3://bucket/prefix"))
    template = _template(job)
    return _pod("holdfast-doctor-rank", template.get("metadata", {}), template["spec"])


def _template(node: Any) -> dict[str, Any]:
    """The first pod template below `node`."""
    waiting = [node]
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, dict):
            inner = found.get("template")
            if isinstance(inner, dict) and "containers" in inner.get("spec", {}):
                return inner
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
    raise AssertionError("the training job has no pods")


def step_pod(spec: Spec, account: str) -> dict[str, Any]:
    """The train step's pod, from Argo's template, with the account that steps have there."""
    from holdfast.pipelines.backends.argo import argo_objects

    workflow = argo_objects(spec)[0]["spec"]
    step = next(one for one in workflow["templates"] if one["name"] == "train")
    spec_of_pod = {
        "containers": [{"name": "main", **step["container"]}],
        "restartPolicy": "Never",
        "securityContext": workflow["securityContext"],
        "serviceAccountName": account,
        "volumes": [*workflow["volumes"], *step.get("volumes", [])],
    }
    for name in ("nodeSelector", "tolerations"):
        if found := step.get(name) or workflow.get(name):
            spec_of_pod[name] = found
    return _pod("holdfast-doctor-step", step.get("metadata", {}), spec_of_pod)


def _pod(name: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    kept = {key: metadata[key] for key in ("labels", "annotations") if key in metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **kept}, "spec": spec}
