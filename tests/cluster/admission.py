"""Admission checks of the emulated API server: service accounts, pod security, quotas.

They refuse well-formed objects with the real server's messages. Written after kubernetes/kubernetes v1.36:
plugin/pkg/admission/serviceaccount, staging/src/k8s.io/pod-security-admission,
staging/src/k8s.io/apiserver/pkg/admission/plugin/resourcequota.
"""

from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from tests.cluster.objects import Object, Objects, StatusError, Table
from tests.cluster.podsecurity import refusal, violations

ENFORCE = "pod-security.kubernetes.io/enforce"


class Admission:
    """Admission of new objects, called while `objects.changed` is held. A namespace without labels, quotas and
    accounts admits everything but pods of a missing account; `default` always exists."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __call__(self, plural: str, body: Object) -> None:
        if plural != "pods":
            return
        metadata, spec = body["metadata"], body.get("spec", {})
        name, namespace = metadata["name"], metadata["namespace"]
        for limits in self._objects.all("limitranges", namespace):
            _give_defaults(spec, limits)
        account = spec.get("serviceAccountName", "default")
        if account != "default" and self._objects.get("serviceaccounts", account, namespace) is None:
            raise StatusError(
                403,
                f'pods "{name}" is forbidden: error looking up service account {namespace}/{account}: '
                f'serviceaccount "{account}" not found',
            )
        place = self._objects.get("namespaces", namespace) or {"metadata": {}}
        level = place["metadata"].get("labels", {}).get(ENFORCE, "privileged")
        if problems := violations(level, spec):
            raise StatusError(403, refusal(name, level, problems))
        for quota in self._objects.all("resourcequotas", namespace):
            self._count(name, spec, quota)

    def _count(self, name: str, spec: Object, quota: Object) -> None:
        hard = quota["spec"]["hard"]
        amounts = usage(spec)
        if missing := sorted(
            key for key in hard if key.partition(".")[0] in ("requests", "limits") and key not in amounts
        ):
            text = f"failed quota: {quota['metadata']['name']}: must specify {', '.join(missing)}"
            raise StatusError(403, f'pods "{name}" is forbidden: {text}')
        used = used_of(self._objects, quota)
        exceeded = [
            key for key in sorted(hard) if key in amounts and used[key] + amounts[key] > parse_quantity(hard[key])
        ]
        if exceeded:
            parts = [
                ", ".join(f"{key}={_text(values[key])}" for key in exceeded)
                for values in (amounts, used, {key: parse_quantity(hard[key]) for key in exceeded})
            ]
            raise StatusError(
                403,
                f'pods "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, '
                f"requested: {parts[0]}, used: {parts[1]}, limited: {parts[2]}",
            )


def _give_defaults(spec: Object, limits: Object) -> None:
    """Default resources of a container that requests nothing."""
    for limit in limits["spec"]["limits"]:
        if limit["type"] != "Container":
            continue
        for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
            resources = container.setdefault("resources", {})
            given_limits = resources.get("limits", {})
            resources["limits"] = {**limit.get("default", {}), **given_limits}
            resources["requests"] = {**limit.get("defaultRequest", {}), **given_limits, **resources.get("requests", {})}


def usage(spec: Object) -> dict[str, Decimal]:
    """What a pod counts for in a quota: the sum of its containers, or an init container where that requests more."""
    amounts: dict[str, Decimal] = {"pods": Decimal(1)}
    for group in ("requests", "limits"):
        whole: dict[str, Decimal] = {}
        for container in spec.get("containers") or []:
            for resource, amount in (container.get("resources", {}).get(group) or {}).items():
                whole[resource] = whole.get(resource, Decimal(0)) + parse_quantity(amount)
        for container in spec.get("initContainers") or []:
            for resource, amount in (container.get("resources", {}).get(group) or {}).items():
                whole[resource] = max(whole.get(resource, Decimal(0)), parse_quantity(amount))
        amounts |= {f"{group}.{resource}": amount for resource, amount in whole.items()}
    return amounts


def used_of(objects: Table, quota: Object) -> dict[str, Decimal]:
    """How much of a quota the running pods of its namespace use."""
    used = dict.fromkeys(quota["spec"]["hard"], Decimal(0))
    for pod in objects.all("pods", quota["metadata"]["namespace"]):
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        for key, amount in usage(pod.get("spec", {})).items():
            if key in used:
                used[key] += amount
    return used


def quota_status(objects: Table, quota: Object) -> Object:
    """The status that a quota's controller writes."""
    used = {key: _text(amount) for key, amount in used_of(objects, quota).items()}
    return {"hard": dict(quota["spec"]["hard"]), "used": used}


def _text(amount: Decimal) -> str:
    for suffix, size in (("Gi", 2**30), ("Mi", 2**20)):
        if amount >= size and amount % size == 0:
            return f"{amount / size:f}{suffix}"
    return f"{amount.normalize():f}"
