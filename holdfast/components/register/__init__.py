"""Register step: a blessed model becomes a version of a registered model in MLflow, with its whole lineage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.components.register.registration import NotBlessedError, Registration, register
from holdfast.store import Store, layout
from holdfast.telemetry import recorded_step

if TYPE_CHECKING:
    from holdfast.spec import Spec

__all__ = ["NotBlessedError", "Registration", "run"]


def run(spec: Spec, run_id: str, store: Store, verdict: str | None = None) -> Registration:
    """Register the model of a run, or return its existing registration, and apply the spec's `serving`. See
    `registration` and `holdfast.serving`."""
    known = run_id if store.stat(layout.result(run_id)) is not None else ""  # an unknown run id leaves no trace
    with recorded_step(store, known, "register") as ended:
        registration = register(spec, run_id, store, verdict)
        _publish(spec, registration, store)
        ended(str(registration.version))
    return registration


def _publish(spec: Spec, registration: Registration, store: Store) -> None:
    """Publish the version. It is served only while it is the champion, so a repetition after a rollback does not
    undo the rollback."""
    serving = spec.serving
    if serving.kserve is None and serving.deployment is None and serving.model_registry is None:
        return
    from holdfast.serving import publish
    from holdfast.tracking import champion, trusted_stores, versions

    stores = trusted_stores(spec, store)
    version = next(
        candidate for candidate in versions(registration.model, stores) if candidate.version == registration.version
    )
    now = champion(registration.model, stores)
    publish(spec, version, champion=now is not None and now.version == version.version)
