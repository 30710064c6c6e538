"""The store's records of registered versions, and the check that a version in MLflow matches one of them.

MLflow names the champion, and any client that reaches it can change that. A version counts only with the record that
`register` wrote into the store. It also needs the verdict and the export that the record names by digest. Any other
version is foreign: it is shown, with the reason, and never used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from pydantic import BaseModel, ValidationError

from holdfast.model.exported import read_record
from holdfast.runtime.environment import tracking_uri
from holdfast.runtime.secrets import redact
from holdfast.spec import Spec, digest
from holdfast.spec.errors import DataError, ForeignVersionError, MissingError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.store import Store, TooLargeError, layout, open_store, read_bounded

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_SQLITE = "sqlite:///"
COMPARED_TAGS = ("run_id", "dataset_id", "code", "export", "state_digest", "export_digest", "verdict", "verdict_digest")


class Registration(BaseModel, frozen=True):
    """A registered model version. `runs/<run-id>/registrations/<key>.json`."""

    run_id: str
    model: str
    version: int
    alias: str  # given at registration: champion or challenger; empty: not given yet
    verdict: str  # key of the verdict that blessed it
    verdict_digest: str  # digest of the bytes of that verdict
    dataset_id: str
    export: str  # key prefix of the exported model
    export_digest: str
    state_digest: str
    run_digest: str  # digest of the bytes of run.json; empty without one
    source: str  # the model's source in MLflow, without credentials
    tags: dict[str, str]  # the whole lineage
    created: float  # Unix seconds
    mlflow_run_id: str
    tracking: str  # address of the MLflow, without credentials
    documents: dict[str, str] = {}  # digests of the bytes of the model card and the bill of materials, by name

    @property
    def uri(self) -> str:
        """The URI for `mlflow models serve -m` and `mlflow.pyfunc.load_model`."""
        return f"models:/{self.model}/{self.version}"


def registry_name(uri: str) -> str:
    """The name of an MLflow in keys and verdicts. For an SQLite file it is the file name, since its folder may be
    moved. It never contains credentials."""
    if uri.startswith(_SQLITE):
        return _SQLITE + uri.removeprefix(_SQLITE).partition("?")[0].rpartition("/")[2]
    return redact(uri).rstrip("/")


def registration_key(model: str, uri: str | None = None) -> str:
    """The key of a registration's record: it identifies the registered model's name and the MLflow."""
    return digest([model, registry_name(uri or tracking_uri())])


def content_digest(data: bytes) -> str:
    """The digest by which one record references another: of its bytes."""
    return blake3(data).hexdigest()[:32]


def trusted_stores(spec: Spec, store: Store) -> tuple[Store, ...]:
    """The stores whose registrations count: the one in use, and those that the spec names."""
    extra = (open_store(url) for url in spec.registration.trusted_stores)
    return (store, *(other for other in extra if other.url != store.url))


def read_registration(store: Store, key: str) -> Registration | None:
    """A record; None if it does not exist or has another form than today's. Registering again writes it."""
    try:
        return Registration.model_validate_json(read_bounded(store, key))
    except (MissingError, ValidationError, RecursionError, TooLargeError):
        return None


def require_registered(
    version: ModelVersion, stores: Sequence[Store], uri: str
) -> tuple[Store, Registration, dict[str, Any]]:
    """The store and the record of a version in MLflow, and the metrics of the verdict that blessed it. Raises
    ForeignVersionError, with the reason, for a version that does not count."""
    subject = f"version {version.version} of {version.name!r} in {redact(uri)}"
    run_id = version.tags.get("holdfast.run_id", "")
    if not run_id:
        raise ForeignVersionError(f"{subject} was not made by Holdfast; promote one of `holdfast models list`")
    for store in stores:
        registration = _record(store, version, run_id, uri)
        if registration is not None:
            _require_same(registration, version, subject)
            return store, registration, _figures(store, registration, subject)
    origin, store_url = version.tags.get("holdfast.store", ""), stores[0].url
    if origin and origin != redact(store_url):
        remedy = (
            f"it says that it was registered from the store {origin}, and this one is {store_url}: name that store "
            "(--store, HOLDFAST_STORE, or registration.trusted_stores in a spec) if you trust it"
        )
    else:
        remedy = "promote one that it has: `holdfast models list` lists them; or run the spec of this one again"
    raise ForeignVersionError(f"{subject} is foreign: {store_url} has no registration of it; {remedy}")


def described_run(store: Store, run_id: str, run_digest: str) -> dict[str, Any]:
    """`run.json` of a registered run; empty where it had none. Raises DataError if it is not the one that was
    registered."""
    if not run_digest:
        return {}
    key = layout.run(run_id, "run.json")
    data = read_bounded(store, key)
    if content_digest(data) != run_digest:
        raise DataError(f"{store.url}/{key}: is not the record of the run that was registered; restore it")
    return parse_json_object(data, f"{store.url}/{key}", finite=False)


def _record(store: Store, version: ModelVersion, run_id: str, uri: str) -> Registration | None:
    """The record of a version: under the key of this MLflow, or of the same MLflow under another address."""
    try:
        expected = layout.registration(run_id, registration_key(version.name, uri))
        identity = (version.name, int(version.version), run_id)
        registration = read_registration(store, expected)
        if registration is not None and (registration.model, registration.version, registration.run_id) == identity:
            return registration
        for info in store.list(layout.registrations(run_id)):
            registration = read_registration(store, info.key)
            if registration is not None and (registration.model, registration.version, registration.run_id) == identity:
                return registration
    except ValueError:  # a tag that is no part of a key
        return None
    return None


def _require_same(found: Registration, version: ModelVersion, who: str) -> None:
    """Raise ForeignVersionError unless MLflow's tags and source equal the registered ones."""
    for name in COMPARED_TAGS:
        ours, theirs = found.tags.get(f"holdfast.{name}", ""), version.tags.get(f"holdfast.{name}", "")
        if ours != theirs:
            raise ForeignVersionError(
                f"{who} is foreign: its tag holdfast.{name} is {theirs!r}, and {ours!r} was registered; another client "
                "changed it in MLflow. Promote another version, or set the tag back"
            )
    if redact(version.source or "") != found.source:
        raise ForeignVersionError(
            f"{who} is foreign: its source is {redact(version.source or '')}, and {found.source} was registered; "
            "it was changed in MLflow. Promote another version"
        )


def _figures(store: Store, found: Registration, who: str) -> dict[str, Any]:
    """The metrics of the verdict that blessed a registered model, after checking the chain of digests."""
    path = layout.verdict(found.run_id, found.verdict)
    for key in (path, layout.blessing(found.run_id, found.verdict_digest)):
        try:
            data = read_bounded(store, key)
        except MissingError:
            continue
        if content_digest(data) == found.verdict_digest:
            break
    else:
        raise ForeignVersionError(
            f"{who} does not count: {store.url}/{path} is not the verdict that blessed it, and there is no copy "
            "of that one; restore it, or run its spec again"
        )
    verdict = parse_json_object(data, f"{store.url}/{path}", finite=False)  # the bytes that were registered
    identity = tuple(verdict.get(name) for name in ("word", "run_id", "state_digest", "export_digest"))
    if identity != ("blessed", found.run_id, found.state_digest, found.export_digest):
        raise ForeignVersionError(
            f"{who} does not count: {store.url}/{path} does not bless this model; evaluate its run again"
        )
    try:
        read_record(store, found.export, found.export_digest)
    except MissingError:
        pass  # the reader of the model reports it
    except DataError as error:
        raise ForeignVersionError(f"{who} does not count: {error}") from None
    return {
        name: value
        for name, value in (verdict.get("metrics") or {}).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
