"""Checks of the object store and of MLflow."""

import secrets
from collections.abc import Iterator

from holdfast.pipelines.doctor.findings import TIMEOUT, Finding
from holdfast.runtime.secrets import redact
from holdfast.spec import Spec
from holdfast.spec.errors import HoldfastError, StoreRefusedError
from holdfast.store import open_store

# Check that the store responds and supports conditional writes, on which everything else relies.

STORE_CHECK = "store"


def check_store(url: str, *, on_cluster: bool) -> Iterator[Finding]:
    """One finding about the store at `url`."""
    try:
        store = open_store(url, deadline=TIMEOUT)
        key = f"doctor/{secrets.token_hex(8)}"
        store.put_if_absent(key, b"doctor")  # a store without conditional writes refuses the first one
        store.delete(key)
    except StoreRefusedError as error:
        remedy = "two attempts could overwrite each other: use a server that holds If-None-Match and If-Match"
        yield Finding(STORE_CHECK, "fail", str(error), remedy, error.exit_code)
        return
    except HoldfastError as error:
        remedy = "check HOLDFAST_STORE, AWS_ENDPOINT_URL and credentials that may get, put, list and delete objects"
        yield Finding(STORE_CHECK, "fail", f"{error}", remedy, error.exit_code)
        return
    if on_cluster and url.startswith("file:"):
        remedy = "set HOLDFAST_STORE=s3://bucket/prefix, or mount the same folder into every pod (cluster.volumes)"
        yield Finding(STORE_CHECK, "warn", f"{store.url} is a folder of this machine: pods do not see it", remedy)
    else:
        yield Finding(STORE_CHECK, "ok", f"{store.url} answers and holds conditional writes")


# Check that MLflow responds, that the pods of a run can reach it, and that this machine may write its artifacts.

MLFLOW_CHECK = "mlflow"


def check_mlflow(uri: str, *, on_cluster: bool, spec: Spec | None = None) -> Iterator[Finding]:
    """Findings about the MLflow at `uri` and the experiment of `spec` in it. A missing local file is not created."""
    from holdfast.tracking.preflight import require_address, require_usable

    shown_uri = redact(uri)
    try:
        require_address(uri)
        if spec is not None:
            require_usable(spec, uri)
    except HoldfastError as error:
        yield Finding(MLFLOW_CHECK, "fail", str(error), "fix it before a training is paid for", error.exit_code)
        return
    if not uri.startswith("http"):
        remedy = "set MLFLOW_TRACKING_URI to a server that the pods reach"
        message = f"{shown_uri} is a file of this machine: pods do not see it"
        yield (
            Finding(MLFLOW_CHECK, "warn", message, remedy)
            if on_cluster
            else Finding(MLFLOW_CHECK, "ok", f"{shown_uri}, local")
        )
        return
    yield from _server(uri, shown_uri)


def _server(uri: str, shown: str) -> Iterator[Finding]:
    from holdfast.tracking.connection import connect, translated

    client = connect(uri, timeout=TIMEOUT)
    try:
        with translated(uri):
            experiments = client.search_experiments(max_results=1)
    except HoldfastError as error:
        remedy = f"check MLFLOW_TRACKING_URI, its credentials, and the server: curl {shown}/health"
        yield Finding(MLFLOW_CHECK, "fail", f"{shown}: {_message_of(error, uri)}", remedy, error.exit_code)
        return
    yield Finding(MLFLOW_CHECK, "ok", f"{shown} answers")
    if experiments:
        yield from _artifacts(uri, experiments[0].artifact_location)


def _artifacts(uri: str, location: str) -> Iterator[Finding]:
    """Check that this machine can reach artifacts that MLflow's clients write directly."""
    from holdfast.tracking.artifacts import bounded
    from holdfast.tracking.connection import translated

    if location.startswith(("mlflow-artifacts:", "http")):  # the server writes them
        return
    try:
        with translated(uri):
            bounded(lambda: _listed(location), "listing artifacts", float(TIMEOUT))
    except HoldfastError as error:
        message = _message_of(error, uri)
        yield Finding(
            MLFLOW_CHECK,
            "warn",
            f"artifacts lie in {redact(location)}, which clients write themselves: {message}",
            "give runs credentials for it, or start the server with --serve-artifacts; metrics do not need it",
        )


def _message_of(error: HoldfastError, uri: str) -> str:
    return " ".join(str(error).split()).removeprefix(f"MLflow at {redact(uri)}: ")[:400]


def _listed(location: str) -> object:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(location).list_artifacts()
