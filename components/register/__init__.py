"""The register step: a blessed model becomes a version of a registered model in MLflow, with its whole lineage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.components.register.registration import NotBlessedError, Registration, register
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import recorded_step

if TYPE_CHECKING:
    from holdfast.components.spec import Spec

__all__ = ["NotBlessedError", "Registration", "run"]


def run(spec: Spec, run_id: str, store: Store, verdict: str | None = None) -> Registration:
    """Register the model of a run, or return the registration that there is. See `registration`."""
    known = run_id if store.stat(layout.result(run_id)) is not None else ""  # a name that is no run leaves no trace
    with recorded_step(store, known, "register") as ended:
        registration = register(spec, run_id, store, verdict)
        ended(str(registration.version))
    return registration
