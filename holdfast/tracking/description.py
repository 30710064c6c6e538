"""The description of a Holdfast run in its MLflow run, except the metrics: parameters, tags, the dataset, and the
spec.

Describing is idempotent and may run in several processes concurrently. Parameters stay as the first attempt logged
them. MLflow does not change parameters, and those that may differ between attempts cannot change the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

from holdfast.dataset.manifest import Manifest
from holdfast.runtime.secrets import redact
from holdfast.spec import Spec, digest, dump_spec
from holdfast.store import Store, layout
from holdfast.tracking.artifacts import dvc_revisions, git_commit, write_text
from holdfast.tracking.failures import write_missing

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Param

# MLflow's own limits, for each request or value.
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 6000
_MAX_TAG_LENGTH = 8000
_MAX_PROFILE_SOURCES = 100  # ours: the whole manifest is in the store


def describe(client: MlflowClient, mlflow_run_id: str, spec: Spec, manifest: Manifest | None, store: Store) -> None:
    """Write the description of a run to its MLflow run. Writes no artifact: this machine may lack access to MLflow's
    artifacts, and the metrics do not wait for it. A training script has no dataset, and so no `manifest`. Raises what
    MLflow's client raises."""
    from mlflow.entities import DatasetInput, InputTag, Param, RunTag

    params = [Param(key, value[:_MAX_PARAM_LENGTH]) for key, value in _flat(spec.model_dump(mode="json"))]
    for start in range(0, len(params), _MAX_PARAMS):
        write_missing(
            partial(_not_logged, client, mlflow_run_id, params[start : start + _MAX_PARAMS]),
            lambda absent: client.log_batch(mlflow_run_id, params=absent),
        )
    tags = [RunTag(key, value[:_MAX_TAG_LENGTH]) for key, value in _tags(spec, manifest, store).items()]

    def other_tags() -> list[RunTag]:
        current = client.get_run(mlflow_run_id).data.tags
        return [tag for tag in tags if current.get(tag.key) != tag.value]

    write_missing(other_tags, lambda absent: client.log_batch(mlflow_run_id, tags=absent))
    if manifest is None:
        return
    trained_on = DatasetInput(_dataset(spec, manifest, store), [InputTag("mlflow.data.context", "training")])

    def absent_inputs() -> list[DatasetInput]:
        inputs = client.get_run(mlflow_run_id).inputs.dataset_inputs
        return [] if any(input_.dataset.digest == manifest.dataset_id for input_ in inputs) else [trained_on]

    write_missing(absent_inputs, lambda absent: client.log_inputs(mlflow_run_id, absent))


def attach_spec(client: MlflowClient, mlflow_run_id: str, spec: Spec) -> None:
    """Attach the spec to the MLflow run as an artifact. Raises what MLflow's client and its plug-ins raise."""
    write_text(client, mlflow_run_id, dump_spec(spec), "spec.yaml")


def _not_logged(client: MlflowClient, mlflow_run_id: str, params: list[Param]) -> list[Param]:
    logged = client.get_run(mlflow_run_id).data.params
    return [param for param in params if param.key not in logged]


def _tags(spec: Spec, manifest: Manifest | None, store: Store) -> dict[str, str]:
    tags = {
        "holdfast.version": metadata.version("holdfast"),
        "holdfast.store": redact(store.url),
        "holdfast.spec_digest": digest(spec.model_dump(mode="json")),
    }
    if manifest is not None:
        tags["holdfast.dataset_id"] = manifest.dataset_id
    if spec.code is not None:
        tags["holdfast.code"] = spec.code
    if manifest is not None and (revisions := dvc_revisions(manifest)):
        tags["holdfast.dvc_revisions"] = json.dumps(revisions)
    if commit := git_commit():
        tags["mlflow.source.git.commit"] = commit
    return tags


def _dataset(spec: Spec, manifest: Manifest, store: Store) -> Dataset:
    from mlflow.entities import Dataset

    url = f"{redact(store.url)}/{layout.dataset(manifest.dataset_id)}"
    sources = {source.name: {"uri": redact(source.uri), **source.lineage.model_dump()} for source in manifest.sources}
    profile = {
        "train_tokens": manifest.tokens("train"),
        "validation_tokens": manifest.tokens("validation"),
        "sources": dict(list(sources.items())[:_MAX_PROFILE_SOURCES]),
    }
    return Dataset(
        name=spec.name,
        digest=manifest.dataset_id,
        source_type="holdfast",
        source=json.dumps({"uri": url}),
        profile=redact(json.dumps(profile)),
    )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A tree of JSON values as dotted names and texts."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield prefix, str(value)
        return
    for key, item in items:
        yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
