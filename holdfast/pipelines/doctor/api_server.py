"""Check that the API server responds and accepts the credentials."""

from __future__ import annotations

from holdfast.launch.kubernetes.client import Api
from holdfast.launch.kubernetes.configuration import NoClusterError
from holdfast.pipelines.doctor.findings import Finding
from holdfast.spec.errors import AccessDeniedError, HoldfastError

NAME = "api server"
PATIENCE = 3.0  # seconds; a person waits for the result


def reach(namespace: str | None) -> tuple[Finding, Api | None]:
    """The finding, and the client if the server responds."""
    try:
        api = Api.of_this_process(namespace, patience=PATIENCE)
    except NoClusterError as error:
        remedy = "set KUBECONFIG, or run this in a pod; then everything else is checked too"
        return Finding(NAME, "warn", str(error), remedy), None
    try:
        version = api.read("/version") or {}
    except AccessDeniedError as error:
        remedy = "renew your credentials: kubectl auth whoami"
        return Finding(NAME, "fail", f"{api.host} refuses you: {error}", remedy, error.exit_code), None
    except HoldfastError as error:
        remedy = "check the address: kubectl cluster-info"
        return Finding(NAME, "fail", f"{api.host} cannot be reached: {error}", remedy, error.exit_code), None
    return Finding(NAME, "ok", f"{api.host} answers, version {version.get('gitVersion', 'unknown')}"), api
