"""Check that the ConfigMap and the Secrets of a run exist and have the required keys. No value is ever printed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.pipelines.doctor.cluster import Cluster
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec.cluster import SECRETS, SETTINGS
from holdfast.spec.errors import ExitCode

NAME, SECRET_NAME = "settings", "secrets"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def check(cluster: Cluster) -> Iterator[Finding]:
    """Check the ConfigMap, then each Secret."""
    spec = cluster.spec
    settings = spec.cluster.settings if spec else SETTINGS
    environment = spec.cluster.environment if spec else {}
    found = cluster.api.read(f"{_path(cluster)}/configmaps/{settings}") if settings else None
    values: dict[str, Any] = {**((found or {}).get("data") or {}), **environment}
    yield _settings(cluster, settings, found is not None, values)
    named = spec.cluster.secrets if spec else (SECRETS,)
    secrets = {name: cluster.api.read(f"{_path(cluster)}/secrets/{name}") for name in named}
    for name, secret in secrets.items():
        if secret is None and name != SECRETS:
            remedy = f"kubectl create secret generic {name} -n {cluster.namespace} --from-env-file=FILE"
            yield Finding(SECRET_NAME, "fail", f"namespace {cluster.namespace} has no Secret {name!r}", remedy)
    keys = {key for secret in secrets.values() if secret for key in secret.get("data") or {}}
    missing = [key for key in KEYS if key not in keys and key not in values]
    if missing:
        yield Finding(
            SECRET_NAME, "warn",
            f"{' and '.join(missing)} are in no Secret of {cluster.namespace}: pods need an identity of the cloud",
            f"kubectl create secret generic {SECRETS} -n {cluster.namespace} --from-env-file=secrets.env, or give the "
            "service accounts an identity (manifests/components/workload-identity)",
        )  # fmt: skip
    else:
        yield Finding(SECRET_NAME, "ok", f"the keys of S3 are in {', '.join(name for name in named if secrets[name])}")


def _settings(cluster: Cluster, name: str | None, there: bool, values: dict[str, Any]) -> Finding:
    spec = cluster.spec
    missing = [] if "HOLDFAST_STORE" in values or (spec and spec.store) else ["HOLDFAST_STORE"]
    missing += [] if "MLFLOW_TRACKING_URI" in values else ["MLFLOW_TRACKING_URI"]
    where = f"ConfigMap {name}" if name else "cluster.environment"
    if missing:
        about = f"lacks {' and '.join(missing)}" if there or not name else "is not there"
        remedy = (
            f"{where} of namespace {cluster.namespace}: copy manifests/overlays/profile/settings.yaml, and apply it"
        )
        message = f"{where} {about}: steps would end with code {int(ExitCode.BAD_SPEC)} before they begin"
        return Finding(NAME, "fail", message, remedy)
    if not str(values["MLFLOW_TRACKING_URI"]).startswith(("http", "databricks", "postgresql", "mysql", "mssql")):
        remedy = f"write the address of a server into {where}, such as http://mlflow:5000"
        return Finding(NAME, "fail", f"MLFLOW_TRACKING_URI in {where} is no server", remedy)
    return Finding(NAME, "ok", f"{where} says where the store and MLflow are")


def _path(cluster: Cluster) -> str:
    return f"/api/v1/namespaces/{cluster.namespace}"
