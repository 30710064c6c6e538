"""Registration: from a blessed verdict to one version of a registered model, and to the alias that serving follows.

Nothing is registered without a blessed verdict and complete lineage. A run has one version, even if registration is
killed and repeated anywhere. The champion changes in one call. Evaluate decides the blessing.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from holdfast.checkpoint import pin
from holdfast.components.register.documents import CARD, ModelFacts, digests_of, documents_of
from holdfast.components.register.flavours import describe_script_model
from holdfast.components.register.promotion import promote_in_order
from holdfast.components.register.publish import describe_model, publish
from holdfast.dataset.manifest import Manifest, load_manifest
from holdfast.model.exported import read_record, require_intact
from holdfast.runtime.environment import tracking_uri
from holdfast.runtime.secrets import redact
from holdfast.scoring import reached_against, record_order, settings_key
from holdfast.spec import ExitCode, HoldfastError, Spec, digest, dump_spec
from holdfast.spec.errors import ChampionChangedError, MissingError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.operations import Evaluation
from holdfast.store import Store, layout
from holdfast.store.json_reading import read_bounded
from holdfast.tracking import (
    Champion,
    Registration,
    RunTracker,
    champion,
    connect,
    registration_key,
    trusted_stores,
)
from holdfast.tracking.artifacts import dvc_revisions, git_commit, whole_tags
from holdfast.tracking.connection import translated
from holdfast.tracking.failures import write_missing
from holdfast.tracking.registrations import content_digest, read_registration
from holdfast.tracking.registry import CHALLENGER, CHAMPION, all_versions, set_alias

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

log = logging.getLogger("holdfast.register")


VERSION_KEY_TAG = "holdfast.version_key"
BLESSED = "blessed"
_MAX_TAG = 5000  # MLflow allows longer tags, but some of its databases do not
REQUIRED_OF_RESULT = ("step", "checkpoint", "export", "export_digest", "state_digest")


class NotBlessedError(HoldfastError):
    """The run has no blessed verdict."""

    exit_code = ExitCode.NOT_BLESSED


@dataclass(frozen=True)
class _Lineage:
    """The lineage of a version's tags, checked for completeness."""

    result: Mapping[str, Any]
    verdict: Mapping[str, Any]
    verdict_key: str
    verdict_data: bytes
    manifest: Manifest | None  # None for a script without data


def register(spec: Spec, run_id: str, store: Store, verdict: str | None = None) -> Registration:
    """Register the model of `run_id`, or return its existing registration. `verdict` is the key of the verdict to use.
    The default is the newest one under the spec's evaluation settings.

    Raises:

    - NotBlessedError without a blessed verdict.
    - ChampionChangedError if the champion has changed since the verdict.
    - MissingError if a part of the lineage is not in the store.
    - DataError if the export is damaged.
    - ForeignVersionError if the champion is not a version that the store registered.
    - TrackingUnavailable.
    """
    uri = tracking_uri()
    model = spec.registered_model
    stores = trusted_stores(spec, store)
    compared = spec.evaluation.versus_champion != "ignore"
    now = champion(model, stores, uri) if compared else None
    lineage = _lineage(spec, run_id, store, verdict, now)
    export, export_digest = lineage.result["export"], lineage.result["export_digest"]
    dataset_id = str(lineage.result.get("dataset_id") or "")
    client = connect(uri, timeout=300)  # a server may need minutes for the last bytes of a large file
    key = layout.registration(run_id, registration_key(model, uri))
    version_key = digest([run_id, export, export_digest])
    recorded = read_registration(store, key)
    if recorded is not None and recorded.alias and recorded.export_digest == export_digest:
        with translated(uri):
            versions = _versions_with(client, model, version_key)
        if any(int(known_version.version) == recorded.version for known_version in versions):
            require_intact(store, export, export_digest, changed=True)
            log.info("run %s is registered already: %s", run_id, recorded.uri)
            return recorded
    if compared and spec.registration.promote:
        _require_fresh(lineage, champion(model, stores, uri))
    documents = _write_documents(spec, run_id, store, lineage, registration_key(model, uri))
    mlflow_run_id = RunTracker.open(spec, run_id, dataset_id, store, uri).mlflow_run_id
    tags = _tags(spec, run_id, store, lineage)
    with translated(uri):
        _registered_model(client, model)
        describe = describe_model if spec.train.script is None else partial(describe_script_model, spec, store, export)
        source = publish(
            client, uri, mlflow_run_id, f"model-{version_key}", store, export, expected=export_digest, describe=describe
        )
        version = _sole_version(client, model, version_key, source)
        shown = whole_tags(client, mlflow_run_id, {VERSION_KEY_TAG: version_key, **tags}, _MAX_TAG)
        if version is None:
            version = _create(client, model, version_key, source, mlflow_run_id, shown)
        else:  # from an earlier call, possibly under another verdict
            _set_tags(client, model, version, shown)
        _describe(client, model, version, documents[CARD].decode())
    reason = f"registered as models:/{model}/{version} in {redact(uri)}"
    holder = f"{model.replace(' ', '_')}-{version}"[-128:]
    pin(store, run_id, lineage.result["step"], holder, reason, state_digest=lineage.result["state_digest"])
    registration = Registration(
        run_id=run_id,
        model=model,
        version=version,
        alias="",
        verdict=lineage.verdict_key,
        verdict_digest=content_digest(lineage.verdict_data),
        dataset_id=dataset_id,
        export=export,
        export_digest=export_digest,
        state_digest=lineage.result["state_digest"],
        run_digest=_digest_of(store, layout.run(run_id, "run.json")),
        source=redact(source),
        tags=tags,
        created=time.time(),
        mlflow_run_id=mlflow_run_id,
        tracking=redact(uri),
        documents=digests_of(documents),
    )
    store.put(layout.blessing(run_id, registration.verdict_digest), lineage.verdict_data)
    _record(store, key, registration)  # first: only versions that this store registered become champion
    alias = CHAMPION if spec.registration.promote else CHALLENGER
    if alias == CHAMPION:
        promote_in_order(
            stores,
            model,
            version,
            uri,
            lambda now: _require_fresh(lineage, now if compared else None),
            compared=compared,
        )
    else:
        with translated(uri):
            set_alias(client, model, CHALLENGER, version)
    registration = registration.model_copy(update={"alias": alias})
    _record(store, key, registration)
    log.info("registered %s as %s", registration.uri, alias)
    return registration


def _write_documents(spec: Spec, run_id: str, store: Store, lineage: _Lineage, key: str) -> dict[str, bytes]:
    """Write the documents of the version with this registration key, and return them by name."""
    record = read_record(store, lineage.result["export"], lineage.result["export_digest"])
    facts = ModelFacts(spec, run_id, lineage.result, lineage.verdict, lineage.manifest, record, git_commit() or "")
    documents = documents_of(facts)
    for name, data in documents.items():
        store.put(layout.model_document(run_id, key, name), data)
    return documents


def _record(store: Store, key: str, registration: Registration) -> None:
    store.put(key, registration.model_dump_json(indent=1).encode())


def _digest_of(store: Store, key: str) -> str:
    """The digest by which other records refer to a record. Empty if it does not exist."""
    try:
        return content_digest(store.get(key))
    except MissingError:
        return ""


def _lineage(spec: Spec, run_id: str, store: Store, verdict_key: str | None, now: Champion | None) -> _Lineage:
    result = _read(store, layout.result(run_id), "the run is not finished: train it first")
    absent = [name for name in REQUIRED_OF_RESULT if not result.get(name) and result.get(name) != 0]
    origin = "code" if spec.train.script is not None else "dataset_id"
    absent += [] if result.get(origin) else [origin]
    if absent:
        raise MissingError(f"{layout.result(run_id)}: {', '.join(absent)} missing; run train again, it writes it anew")
    if verdict_key is None:
        verdict_key = _newest_verdict(spec, run_id, store, now)
    verdict_data = _get(store, layout.verdict(run_id, verdict_key), "evaluate the run first")
    verdict = parse_json_object(verdict_data, f"{store.url}/{layout.verdict(run_id, verdict_key)}", finite=False)
    if verdict.get("word") != BLESSED:
        reasons = "; ".join(str(reason) for reason in verdict.get("reasons") or ["it gives no reason"])
        raise NotBlessedError(
            f"run {run_id}: verdict {verdict_key} is {verdict.get('word')!r}: {reasons}; "
            "fix the data or the training, or the bounds in the spec's evaluation section"
        )
    judged = tuple(verdict.get(name) for name in ("run_id", "state_digest", "export_digest"))
    if judged != (run_id, result["state_digest"], result["export_digest"]):
        raise NotBlessedError(
            f"run {run_id}: verdict {verdict_key} is about other weights ({verdict.get('state_digest')} of run "
            f"{verdict.get('run_id')}, export {verdict.get('export_digest')}) than the run's "
            f"({result['state_digest']}, export {result['export_digest']}); evaluate this run first"
        )
    if store.stat(result["checkpoint"]) is None:
        raise MissingError(
            f"{store.url}/{result['checkpoint']}: the checkpoint that the model came from is not there; "
            "restore it, a model is not registered without its lineage"
        )
    dataset_id = result.get("dataset_id")
    manifest = load_manifest(store, dataset_id) if dataset_id else None
    return _Lineage(result, verdict, verdict_key, verdict_data, manifest)


def _newest_verdict(spec: Spec, run_id: str, store: Store, now: Champion | None) -> str:
    """The key of the newest verdict under the spec's evaluation settings. A verdict against the current champion has
    priority: the run may have been judged for another MLflow since."""
    folder = layout.run(run_id, "evaluations/")
    listed = [info for info in store.list(folder) if info.key.endswith(".json")]
    verdicts = [(info.key, _read(store, info.key, "evaluate the run first")) for info in listed]
    verdicts.sort(key=lambda one: record_order(*one), reverse=True)
    fitting = [(key, verdict) for key, verdict in verdicts if _fits(key.removeprefix(folder), verdict, spec)]
    for key, _ in sorted(fitting, key=lambda one: not reached_against(one[1], now)):
        return key.removeprefix(folder).removesuffix(".json")
    raise NotBlessedError(
        f"run {run_id}: {store.url}/{folder} holds no verdict under the spec's evaluation settings; "
        "evaluate the run first"
    )


def _fits(name: str, verdict: Mapping[str, Any], spec: Spec) -> bool:
    """Whether a verdict was reached under the evaluation settings of a spec. With a command, its key tells by which
    code."""
    if spec.evaluation.command:
        return name.startswith(f"{settings_key(spec)}-")
    if not (settings := verdict.get("settings")):
        return False
    try:  # fields that are younger than the verdict have their defaults
        return Evaluation.model_validate(settings) == spec.evaluation
    except ValidationError:
        return False


def _require_fresh(lineage: _Lineage, now: Champion | None) -> None:
    """Refuse a verdict that was reached against another champion than the one this model would replace."""
    verdict, digest_now = lineage.verdict, lineage.result["state_digest"]
    if now is None or reached_against(verdict, now):
        return
    if (now.run_id, now.state_digest or digest_now) == (verdict["run_id"], digest_now):  # it is this model
        return
    opponent = verdict.get("champion")
    against = f"against version {opponent['version']} of {opponent['model']}" if opponent else "without a champion"
    elsewhere = f" in {opponent['registry']}" if opponent and opponent.get("registry") != now.registry else ""
    raise ChampionChangedError(
        f"run {verdict['run_id']}: verdict {lineage.verdict_key} was reached {against}{elsewhere}, and the champion of "
        f"{now.model} in {now.registry} is version {now.version} now; run the same command again: it is compared with "
        "that one"
    )


def _tags(spec: Spec, run_id: str, store: Store, lineage: _Lineage) -> dict[str, str]:
    """The complete lineage as tags, without secrets."""
    result, manifest = lineage.result, lineage.manifest
    metrics = {
        name: value for name, value in (lineage.verdict.get("metrics") or {}).items() if isinstance(value, int | float)
    }
    return {
        "holdfast.run_id": run_id,
        "holdfast.store": redact(store.url),
        **_data_tags(manifest),
        **({"holdfast.code": spec.code} if spec.code else {}),
        "holdfast.spec": dump_spec(spec),
        "holdfast.checkpoint": result["checkpoint"],
        "holdfast.state_digest": result["state_digest"],
        "holdfast.step": str(result["step"]),
        "holdfast.export": result["export"],
        "holdfast.export_digest": result["export_digest"],
        "holdfast.verdict": lineage.verdict_key,
        "holdfast.verdict_digest": content_digest(lineage.verdict_data),
        "holdfast.metrics": json.dumps(metrics),
        "holdfast.git_commit": git_commit() or "none",
    }


def _data_tags(manifest: Manifest | None) -> dict[str, str]:
    if manifest is None:
        return {}
    return {
        "holdfast.dataset_id": manifest.dataset_id,
        "holdfast.sources": json.dumps({redact(source.uri): source.lineage.digest for source in manifest.sources}),
        "holdfast.dvc_revisions": json.dumps(dvc_revisions(manifest)),
    }


def _versions_with(client: MlflowClient, model: str, version_key: str) -> list[ModelVersion]:
    """The versions with this key, oldest first."""
    return [version for version in all_versions(client, model) if version.tags.get(VERSION_KEY_TAG) == version_key]


def _sole_version(client: MlflowClient, model: str, version_key: str, source: str) -> int | None:
    """The version with this key and this source, if any. Of several concurrent ones, the first stays and the rest
    are deleted. A version with another source is foreign, regardless of its tags."""
    from mlflow.exceptions import MlflowException

    versions = [version for version in _versions_with(client, model, version_key) if version.source == source]
    for surplus in versions[1:]:
        try:
            client.delete_model_version(model, surplus.version)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # its creator has deleted it
                raise
    return int(versions[0].version) if versions else None


def _create(
    client: MlflowClient, model: str, version_key: str, source: str, mlflow_run_id: str, tags: Mapping[str, str]
) -> int:
    """Create the version with this key. Concurrent processes all get the one that stays."""

    def absent() -> list[str]:
        return [source] if _sole_version(client, model, version_key, source) is None else []

    write_missing(absent, lambda _: client.create_model_version(model, source, run_id=mlflow_run_id, tags=dict(tags)))
    version = _sole_version(client, model, version_key, source)
    assert version is not None
    return version


def _set_tags(client: MlflowClient, model: str, version: int, tags: Mapping[str, str]) -> None:
    """Set the tags of a version to the current lineage."""

    def other() -> list[tuple[str, str]]:
        current = client.get_model_version(model, str(version)).tags
        return [(name, value) for name, value in tags.items() if current.get(name) != value]

    def write(changed: list[tuple[str, str]]) -> None:
        for name, value in changed:
            client.set_model_version_tag(model, str(version), name, value)

    write_missing(other, write)


def _describe(client: MlflowClient, model: str, version: int, card: str) -> None:
    """Make the model card, without its front matter, the description of a version."""
    text = card.split("---\n", 2)[2][:_MAX_TAG]

    def other() -> list[str]:
        return [] if client.get_model_version(model, str(version)).description == text else [text]

    write_missing(other, lambda _: client.update_model_version(model, str(version), text))


def _registered_model(client: MlflowClient, model: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _read(store: Store, key: str, remedy: str) -> dict[str, Any]:
    return parse_json_object(_get(store, key, remedy), f"{store.url}/{key}", finite=False)


def _get(store: Store, key: str, remedy: str) -> bytes:
    try:
        return read_bounded(store, key)
    except MissingError:
        raise MissingError(f"{store.url}/{key}: no such object; {remedy}") from None
