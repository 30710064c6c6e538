"""The registered models: which version is the champion, what it was made from, and how to move the alias.

Promises that a version's tags say where its bytes lie in the store, so that a champion can be read without MLflow's
artifacts, and that moving an alias is one call: there is never a moment without a champion. Leaves making versions to
holdfast.components.register.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.components.runtime.environment import tracking_uri
from holdfast.components.runtime.secrets import redact
from holdfast.components.spec import digest
from holdfast.components.spec.errors import MissingError
from holdfast.components.tracking.conflicts import write_missing
from holdfast.components.tracking.connection import connect, registry_uri, translated

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
CHALLENGER = "challenger"
REPLACED_TAG = "holdfast.replaced_champion"


@dataclass(frozen=True)
class Champion:
    """A version of a registered model, as its tags describe it."""

    registry: str  # the MLflow that it is registered in, without credentials
    model: str
    version: int
    run_id: str  # Holdfast's
    store_url: str
    export: str  # key prefix of the Hugging Face export in the store
    dataset_id: str
    metrics: dict[str, Any]  # the metrics of the verdict that blessed it
    tags: dict[str, str]  # the whole lineage
    created: float  # when it was registered, unix seconds

    @property
    def state_digest(self) -> str:
        """The digest of its training state; empty if no tag has it."""
        return self.tags.get("holdfast.state_digest", "")

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this champion and no other: a version's number alone means another model in each MLflow."""
        return {
            "registry": self.registry,
            "model": self.model,
            "version": self.version,
            "run_id": self.run_id,
            "state_digest": self.state_digest,
        }


def registration_key(model: str, uri: str | None = None) -> str:
    """What the record of a registration is called: it stands for the registered model's name and for the MLflow."""
    return digest([model, redact(uri or tracking_uri())])


def champion(model: str, uri: str | None = None) -> Champion | None:
    """The version that the alias `champion` of the registered model names; None if there is none, or if it was not made
    by Holdfast. Raises TrackingUnavailable."""
    uri = uri or tracking_uri()
    client = connect(uri)
    with translated(uri):
        found = version_by_alias(client, model, CHAMPION)
    return None if found is None else _read(found, uri)


def versions(model: str, uri: str | None = None) -> list[Champion]:
    """All versions of the registered model that Holdfast made, oldest first. Raises TrackingUnavailable."""
    uri = uri or tracking_uri()
    client = connect(uri)
    with translated(uri):
        found = all_versions(client, model)
    return [read for version in found if (read := _read(version, uri)) is not None]


def registered(uri: str | None = None) -> list[tuple[Champion, tuple[str, ...]]]:
    """Every version that Holdfast made of any registered model, with its aliases: model by model, newest first. Raises
    TrackingUnavailable."""
    uri = uri or tracking_uri()
    client = connect(uri)
    with translated(uri):
        made = [read for version in all_versions(client) if (read := _read(version, uri)) is not None]
        aliases = {model: client.get_registered_model(model).aliases for model in {version.model for version in made}}
    return [
        (version, tuple(sorted(name for name, of in aliases[version.model].items() if int(of) == version.version)))
        for version in sorted(made, key=lambda version: (version.model, -version.version))
    ]


def promote(model: str, version: int, uri: str | None = None) -> Champion:
    """Make `version` the champion and remember the one it replaces. Raises MissingError or TrackingUnavailable."""
    uri = uri or tracking_uri()
    client = connect(uri)
    with translated(uri):
        target = _named(client, uri, model, version)
        former = version_by_alias(client, model, CHAMPION)
        if former is not None and former.version != target.version:
            _remember(client, model, version, str(former.version))
        set_alias(client, model, CHAMPION, version)
    return target


def rollback(model: str, uri: str | None = None) -> Champion:
    """Make the version that the champion replaced champion again; a second rollback goes one further back. Raises
    MissingError if there is nothing to go back to."""
    uri = uri or tracking_uri()
    client = connect(uri)
    with translated(uri):
        current = version_by_alias(client, model, CHAMPION)
        former = None if current is None else current.tags.get(REPLACED_TAG)
        if former is None:
            raise MissingError(
                f"registered model {model!r} has no earlier champion; promote a version: `holdfast models` lists them"
            )
        target = _named(client, uri, model, int(former))
        set_alias(client, model, CHAMPION, int(former))
    return target


def set_alias(client: MlflowClient, model: str, alias: str, version: int) -> None:
    """Let the alias name the version, whoever moves it at the same moment."""

    def elsewhere() -> list[int]:
        found = version_by_alias(client, model, alias)
        return [] if found is not None and int(found.version) == version else [version]

    write_missing(elsewhere, lambda _: client.set_registered_model_alias(model, alias, str(version)))


def _remember(client: MlflowClient, model: str, version: int, former: str) -> None:
    """Write on a version which champion it replaces."""

    def unknown() -> list[str]:
        return [former] if client.get_model_version(model, str(version)).tags.get(REPLACED_TAG) != former else []

    write_missing(unknown, lambda _: client.set_model_version_tag(model, str(version), REPLACED_TAG, former))


def version_by_alias(client: MlflowClient, model: str, alias: str) -> ModelVersion | None:
    """The version that an alias names, if both exist."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(model, alias)
    except MlflowException as error:
        # A missing alias is an invalid parameter to MLflow, a missing model a missing resource.
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def all_versions(client: MlflowClient, model: str | None = None) -> list[ModelVersion]:
    """All versions of a registered model, or of all of them, oldest first."""
    quoted = None if model is None else model.replace("'", "\\'")
    found: list[ModelVersion] = []
    token = None
    while True:
        page = client.search_model_versions(quoted and f"name = '{quoted}'", page_token=token)
        found += page
        if not (token := page.token):
            return sorted(found, key=lambda version: int(version.version))


def _named(client: MlflowClient, uri: str, model: str, version: int) -> Champion:
    found = {int(one.version): one for one in all_versions(client, model)}
    if version not in found:
        raise MissingError(f"registered model {model!r} has no version {version}; it has {sorted(found) or 'none'}")
    if (read := _read(found[version], uri)) is None:
        raise MissingError(f"version {version} of {model!r} was not made by Holdfast; move its alias in MLflow")
    return read


def _read(version: ModelVersion, uri: str) -> Champion | None:
    tags = dict(version.tags)
    if "holdfast.run_id" not in tags:
        return None
    return Champion(
        registry=redact(registry_uri(uri)),
        model=version.name,
        version=int(version.version),
        run_id=tags["holdfast.run_id"],
        store_url=tags["holdfast.store"],
        export=tags["holdfast.export"],
        dataset_id=tags["holdfast.dataset_id"],
        metrics=json.loads(tags["holdfast.metrics"]),
        tags=tags,
        created=version.creation_timestamp / 1000,
    )
