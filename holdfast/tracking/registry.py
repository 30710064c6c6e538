"""The registered models: which version is the champion, its lineage, and moving the alias.

The description of a version comes from the store's own records and never from MLflow's tags alone (`registrations`). A
champion can be read without MLflow's artifacts. Moving an alias is one call, so there is never a moment without a
champion. `holdfast.components.register` creates versions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.runtime.environment import tracking_uri
from holdfast.spec.errors import ForeignVersionError, MissingError
from holdfast.store import Store, layout
from holdfast.store.sequence import newest, read_record
from holdfast.tracking.connection import connect, registry_uri, translated
from holdfast.tracking.failures import write_missing
from holdfast.tracking.registrations import registration_key, registry_name, require_registered

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
CHALLENGER = "challenger"
REPLACED_TAG = "holdfast.replaced_champion"
LOOKUPS = 16  # registrations that are read concurrently

log = logging.getLogger("holdfast.tracking")
Stores = Store | Sequence[Store]


@dataclass(frozen=True)
class Champion:
    """A version of a registered model, described by the store's records; a foreign one by MLflow's tags."""

    registry: str  # the MLflow that it is registered in, without credentials
    model: str
    version: int
    run_id: str  # Holdfast's id of the run
    store_url: str  # URL of the store that has its registration
    export: str  # key prefix of the Hugging Face export in the store
    export_digest: str
    run_digest: str  # digest of its run.json
    dataset_id: str
    metrics: dict[str, Any]  # the metrics of the verdict that blessed it
    tags: dict[str, str]  # the whole lineage
    created: float  # time of registration, Unix seconds
    foreign: str = ""  # why it does not count; empty for one that does

    @property
    def state_digest(self) -> str:
        """The digest of its training state; empty for a foreign version."""
        return self.tags.get("holdfast.state_digest", "")

    @property
    def identity(self) -> dict[str, Any]:
        """The unique identity of this champion: a version's number alone means another model in each MLflow."""
        return {
            "registry": self.registry,
            "model": self.model,
            "version": self.version,
            "run_id": self.run_id,
            "state_digest": self.state_digest,
        }


def champion(model: str, stores: Stores, uri: str | None = None) -> Champion | None:
    """The version that the alias `champion` of the registered model names; None if there is none. `stores`: the one in
    use, and others that a person trusts. If the alias is gone, the version that the store made champion last counts.
    Raises ForeignVersionError for a version that none of the stores has registered, and TrackingUnavailable."""
    uri, trusted = uri or tracking_uri(), _listed(stores)
    client = connect(uri)
    with translated(uri):
        version = version_by_alias(client, model, CHAMPION)
        if version is None:
            version = _newest_champion(client, model, trusted[0], uri)
    return None if version is None else _ours(version, trusted, uri)


def versions(model: str, stores: Stores, uri: str | None = None) -> list[Champion]:
    """All versions of the registered model, oldest first, foreign ones marked. Raises TrackingUnavailable."""
    uri, trusted = uri or tracking_uri(), _listed(stores)
    client = connect(uri)
    with translated(uri):
        registered_versions = all_versions(client, model)
    return _described(registered_versions, trusted, uri)


def registered(stores: Stores, uri: str | None = None) -> list[tuple[Champion, tuple[str, ...]]]:
    """Every version of any registered model, with its aliases, foreign ones marked: grouped by model, newest first.
    Raises TrackingUnavailable."""
    uri, trusted = uri or tracking_uri(), _listed(stores)
    client = connect(uri)
    with translated(uri):
        registered_versions = all_versions(client)
        aliases = {
            model: client.get_registered_model(model).aliases
            for model in {version.name for version in registered_versions}
        }
    described = _described(registered_versions, trusted, uri)
    return [
        (
            version,
            tuple(sorted(name for name, number in aliases[version.model].items() if int(number) == version.version)),
        )
        for version in sorted(described, key=lambda version: (version.model, -version.version))
    ]


def promote(model: str, version: int, stores: Stores, uri: str | None = None) -> Champion:
    """Make `version` the champion and remember the one it replaces. Raises MissingError, ForeignVersionError or
    TrackingUnavailable."""
    uri, trusted = uri or tracking_uri(), _listed(stores)
    client = connect(uri)
    with translated(uri):
        target = _named(client, uri, model, version, trusted)
        former = version_by_alias(client, model, CHAMPION)
        if former is not None and int(former.version) != version and not _read(former, trusted, uri).foreign:
            _remember(client, model, version, str(former.version))
        set_alias(client, model, CHAMPION, version)
    return target


def rollback(model: str, stores: Stores, uri: str | None = None) -> Champion:
    """Restore the champion that the current one replaced; a second rollback goes one further back. Raises MissingError
    without an earlier champion, ForeignVersionError."""
    uri, trusted = uri or tracking_uri(), _listed(stores)
    client = connect(uri)
    with translated(uri):
        current = version_by_alias(client, model, CHAMPION)
        previous = None if current is None else current.tags.get(REPLACED_TAG, "")
        if previous is None or not previous.isdecimal():
            raise MissingError(
                f"registered model {model!r} has no earlier champion; promote one: `holdfast models list` lists them"
            )
        target = _named(client, uri, model, int(previous), trusted)
        set_alias(client, model, CHAMPION, int(previous))
    return target


def set_alias(client: MlflowClient, model: str, alias: str, version: int) -> None:
    """Set the alias to the version, even if other processes move it at the same moment."""

    def elsewhere() -> list[int]:
        current = version_by_alias(client, model, alias)
        return [] if current is not None and int(current.version) == version else [version]

    write_missing(elsewhere, lambda _: client.set_registered_model_alias(model, alias, str(version)))


def _remember(client: MlflowClient, model: str, version: int, former: str) -> None:
    """Tag a version with the champion that it replaces."""

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
    collected: list[ModelVersion] = []
    token = None
    while True:
        page = client.search_model_versions(quoted and f"name = '{quoted}'", page_token=token)
        collected += page
        if not (token := page.token):
            return sorted(collected, key=lambda version: int(version.version))


def _newest_champion(client: MlflowClient, model: str, store: Store, uri: str) -> ModelVersion | None:
    """The version that the store's newest claim names, if MLflow still has it."""
    from mlflow.exceptions import MlflowException

    folder = layout.champions(registration_key(model, uri))
    number = newest(store, folder)
    if not number:
        return None
    try:
        version = client.get_model_version(model, str(int(read_record(store, folder, number)["version"])))
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
    log.warning(
        "MLflow has no champion of %s; version %s, which this store made champion last, counts until another one is "
        "promoted",
        model,
        version.version,
    )
    return version


def _named(client: MlflowClient, uri: str, model: str, version: int, stores: Sequence[Store]) -> Champion:
    by_number = {int(item.version): item for item in all_versions(client, model)}
    if version not in by_number:
        raise MissingError(f"registered model {model!r} has no version {version}; it has {sorted(by_number) or 'none'}")
    return _ours(by_number[version], stores, uri)


def _listed(stores: Stores) -> Sequence[Store]:
    return stores if isinstance(stores, Sequence) else (stores,)


def _described(found: Sequence[ModelVersion], stores: Sequence[Store], uri: str) -> list[Champion]:
    with ThreadPoolExecutor(LOOKUPS, thread_name_prefix="registrations") as pool:
        return list(pool.map(lambda version: _read(version, stores, uri), found))


def _read(version: ModelVersion, stores: Sequence[Store], uri: str) -> Champion:
    """A version, with the reason if it is foreign."""
    try:
        return _ours(version, stores, uri)
    except ForeignVersionError as error:
        tags = dict(version.tags)
        return Champion(
            registry=registry_name(registry_uri(uri)),
            model=version.name,
            version=int(version.version),
            run_id=tags.get("holdfast.run_id", ""),
            store_url=tags.get("holdfast.store", ""),
            export=tags.get("holdfast.export", ""),
            export_digest="",
            run_digest="",
            dataset_id=tags.get("holdfast.dataset_id", ""),
            metrics={},
            tags=tags,
            created=version.creation_timestamp / 1000,
            foreign=str(error),
        )


def _ours(version: ModelVersion, stores: Sequence[Store], uri: str) -> Champion:
    """A version that counts. Raises ForeignVersionError."""
    store, record, metrics = require_registered(version, stores, uri)
    replaced = version.tags.get(REPLACED_TAG)
    return Champion(
        registry=registry_name(registry_uri(uri)),
        model=record.model,
        version=record.version,
        run_id=record.run_id,
        store_url=store.url,
        export=record.export,
        export_digest=record.export_digest,
        run_digest=record.run_digest,
        dataset_id=record.dataset_id,
        metrics=metrics,
        tags={**record.tags, **({} if replaced is None else {REPLACED_TAG: replaced})},
        created=record.created,
    )
