"""Publication of a registered version: the champion's service and the registry entry."""

import logging
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.launch.kubernetes.client import Api
from holdfast.model.exported import require_intact
from holdfast.serving import deployment, kserve
from holdfast.serving.model_registry import ModelRegistry
from holdfast.spec import Spec, parse_spec
from holdfast.spec.errors import ForeignVersionError, Problem, SpecError
from holdfast.store import Store, open_store
from holdfast.tracking import Champion, versions

SHOWN = ("run_id", "dataset_id", "state_digest", "verdict", "git_commit")  # short values of the lineage
SECONDS = 60.0  # to wait for an unavailable API server

log = logging.getLogger("holdfast.serving")


@dataclass(frozen=True)
class Published:
    """The written objects."""

    service: str = ""  # namespace/name of the InferenceService
    deployment: str = ""  # namespace/name of the Deployment
    entry: str = ""  # id of the ModelVersion in the registry


def publish(spec: Spec, version: Champion, *, champion: bool, api: Api | None = None) -> Published:
    """Publish a registered version as the spec's `serving` demands: enter it in the registry, and serve the champion.

    Safe to repeat. Raises the errors of both, SpecError for a store that KServe cannot read, ForeignVersionError, and
    DataError for a damaged export.
    """
    _require_servable(version)
    service, served, entry = "", "", ""
    if settings := spec.serving.model_registry:
        registry = ModelRegistry(settings.url, settings.author)
        entry = registry.enter(
            version.model,
            str(version.version),
            _source(version),
            "huggingface",
            {**_lineage(version), **_figures(version)},
        )
        if champion:
            registry.point(version.model, str(version.version))
        log.info("version %d of %s is in the Model Registry", version.version, version.model)
    if champion and spec.serving.kserve is not None:
        manifest = inference_service_of(spec, version)
        at = api or Api.of_this_process(_namespace(spec, "kserve"), patience=SECONDS)
        kserve.apply(manifest, at)
        service = f"{at.namespace}/{manifest['metadata']['name']}"
        log.info("InferenceService %s serves version %d of %s", service, version.version, version.model)
    if champion and spec.serving.deployment is not None:
        objects = deployment_of(spec, version)
        at = api or Api.of_this_process(_namespace(spec, "deployment"), patience=SECONDS)
        deployment.apply(objects, at)
        served = f"{at.namespace}/{objects[0]['metadata']['name']}"
        log.info("Deployment %s serves version %d of %s", served, version.version, version.model)
    return Published(service, served, entry)


def inference_service_of(spec: Spec, version: Champion) -> dict[str, Any]:
    """The InferenceService that serves a registered version. Raises ForeignVersionError."""
    if version.foreign:
        raise ForeignVersionError(version.foreign)
    lineage = {"model": version.model, "version": str(version.version), **_lineage(version)}
    return kserve.inference_service(spec, _source(version), lineage)


def deployment_of(spec: Spec, version: Champion) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Deployment and the Service that serve a registered version. Raises ForeignVersionError and SpecError."""
    if version.foreign:
        raise ForeignVersionError(version.foreign)
    lineage = {"model": version.model, "version": str(version.version), **_lineage(version)}
    store_url = version.store_url.rstrip("/")
    return deployment.deployment(spec, store_url, version.export, version.export_digest, lineage)


def settings_of(model: str, store: Store, uri: str | None = None) -> Spec | None:
    """The spec of the newest version of a registered model that this store registered; None where it is not available.

    Its `serving` section has the current settings.
    """
    own = [version for version in versions(model, store, uri) if not version.foreign]
    text = own[-1].tags.get("holdfast.spec", "") if own else ""
    try:
        return parse_spec(text) if text else None
    except SpecError as error:
        log.warning(
            "the spec that version %d of %s was made from is not one of today's: %s", own[-1].version, model, error
        )
        return None


def _require_servable(version: Champion) -> None:
    """Check that the bytes are the registered ones. The serving runtime does not check them."""
    if version.foreign:
        raise ForeignVersionError(version.foreign)
    require_intact(open_store(version.store_url), version.export, version.export_digest, changed=True)


def _namespace(spec: Spec, section: Literal["kserve", "deployment"]) -> str | None:
    """The namespace of what a section creates; None for the namespace of this pod."""
    settings = spec.serving.kserve if section == "kserve" else spec.serving.deployment
    namespace = (settings and settings.namespace) or spec.cluster.namespace
    if not namespace and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        problem = Problem(
            f"serving.{section}.namespace",
            None,
            "is missing, and this process is in no pod whose namespace it could be",
            f"name it: --set serving.{section}.namespace=NAME",
        )
        raise SpecError([problem])
    return namespace


def _source(version: Champion) -> str:
    return f"{version.store_url.rstrip('/')}/{version.export}"


def _lineage(version: Champion) -> dict[str, str]:
    return {name: version.tags[f"holdfast.{name}"] for name in SHOWN if version.tags.get(f"holdfast.{name}")}


def _figures(version: Champion) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in version.metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
