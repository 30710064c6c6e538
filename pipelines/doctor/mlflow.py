"""Whether MLflow answers, where the pods of a run can reach it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.components.runtime.secrets import redact
from holdfast.components.spec.errors import ExitCode
from holdfast.pipelines.doctor.findings import TIMEOUT, Finding

NAME = "mlflow"


def check(uri: str, *, on_cluster: bool) -> Iterator[Finding]:
    """One finding about the MLflow at `uri`. A file is not opened: it may not be there yet."""
    from holdfast.components.tracking import connect

    shown = redact(uri)
    if not uri.startswith("http"):
        remedy = "set MLFLOW_TRACKING_URI to a server that the pods reach"
        message = f"{shown} is a file of this machine: pods do not see it"
        yield Finding(NAME, "warn", message, remedy) if on_cluster else Finding(NAME, "ok", f"{shown}, local")
        return
    try:
        connect(uri, timeout=TIMEOUT).search_experiments(max_results=1)
    except Exception as error:  # noqa: BLE001 - whatever MLflow's client raises is the finding
        said = redact(" ".join(str(error).split()))[:300]
        remedy = f"check MLFLOW_TRACKING_URI, its credentials, and the server: curl {shown}/health"
        yield Finding(NAME, "fail", f"{shown}: {said}", remedy, ExitCode.STORE_UNREACHABLE)
    else:
        yield Finding(NAME, "ok", f"{shown} answers")
