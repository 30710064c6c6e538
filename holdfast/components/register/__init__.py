"""The register step: a blessed model becomes a version of a registered model in MLflow, with its whole lineage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.components.register.registration import NotBlessedError, Registration, register
from holdfast.store import Store, layout
from holdfast.telemetry import recorded_step

if TYPE_CHECKING:
    from holdfast.spec import Spec

__all__ = ["NotBlessedError", "Registration", "run"]


def run(spec: Spec, run_id: str, store: Store, verdict: str | None = None) -> Registration:
    """Register the model of a run, or return the registration that there is, and do what the spec's `serving` says.
    See `registration` and `holdfast.serving`."""
    known = run_id if store.stat(layout.result(run_id)) is not None else ""  # a name that is no run leaves no trace
    with recorded_step(store, known, "register") as ended:
        registration = register(spec, run_id, store, verdict)
        _publish(spec, registration, store)
        ended(str(registration.version))
    return registration


def _publish(spec: Spec, registration: Registration, store: Store) -> None:
    """What is repeated after a rollback must not undo it: a version is served while it is the champion."""
    if spec.serving.kserve is None and spec.serving.model_registry is None:
        return
    from holdfast.serving import publish
    from holdfast.tracking import champion, trusted_stores, versions

    stores = trusted_stores(spec, store)
    made = next(one for one in versions(registration.model, stores) if one.version == registration.version)
    now = champion(registration.model, stores)
    publish(spec, made, champion=now is not None and now.version == made.version)
