"""The one MLflow run of a Holdfast run: a copy of the history in the store, made by any process at any time.

Promises one MLflow run for each run id and, in it, every step once: a step's metrics go over in one transaction, the
next copy starts after the last step that MLflow has, and a row sent twice (same time, same values) is one row. MLflow
being away never raises out of `sync` and `finish`. Leaves the measuring to holdfast.components.telemetry.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from holdfast.components.dataset.manifest import Manifest, load_manifest
from holdfast.components.runtime.environment import tracking_uri
from holdfast.components.runtime.secrets import redact
from holdfast.components.spec import Spec, digest, dump_spec
from holdfast.components.spec.errors import MissingError, StoreUnreachableError
from holdfast.components.store import ConflictError, Store, layout
from holdfast.components.telemetry import Row, read_history
from holdfast.components.tracking.connection import TrackingUnavailable, artifact_location, connect, translated

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Dataset, Metric, Run

RUN_ID_TAG = "holdfast.run_id"
EVALUATION = "evaluation/"
T = TypeVar("T")
Status = Literal["FINISHED", "FAILED", "KILLED"]

# MLflow's own limits, for each request or value.
_MAX_METRICS = 1000
_MAX_PARAMS = 100
_MAX_PARAM_LENGTH = 6000
_MAX_TAG_LENGTH = 8000
_MAX_PROFILE_SOURCES = 100  # ours: the whole manifest is in the store

log = logging.getLogger("holdfast.tracking")


@dataclass
class RunTracker:
    """The MLflow run of one Holdfast run. Get it from `open`, which talks to nobody: MLflow may be away."""

    spec: Spec
    run_id: str
    dataset_id: str
    store: Store
    uri: str
    _client: MlflowClient | None = None
    _mlflow_run_id: str | None = None
    _last_step: int = 0  # every step up to it is in MLflow
    _away: bool = field(default=False, repr=False)

    @classmethod
    def open(cls, spec: Spec, run_id: str, dataset_id: str, store: Store, uri: str | None = None) -> RunTracker:
        """The tracker of `run_id` at `uri` (default: `tracking_uri()`)."""
        return cls(spec=spec, run_id=run_id, dataset_id=dataset_id, store=store, uri=uri or tracking_uri())

    @property
    def mlflow_run_id(self) -> str:
        """MLflow's name for the run, created if there is none. Raises TrackingUnavailable."""
        return self._ensure()[1]

    def begin(self) -> None:
        """Let the MLflow run be there, running, before its first metrics are. Never raises because MLflow or the store
        is away."""
        try:
            client, mlflow_run_id = self._ensure()
            with translated(self.uri):
                client.update_run(mlflow_run_id, status="RUNNING")
        except (TrackingUnavailable, StoreUnreachableError) as error:
            self._miss(error)

    def sync(self) -> int:
        """Copy the steps that MLflow does not have yet; how many. Never raises because MLflow or the store is away:
        that is logged once, and the next call catches up."""
        try:
            copied = self._sync()
        except (TrackingUnavailable, StoreUnreachableError) as error:
            self._miss(error)
            return 0
        if self._away:
            log.info("MLflow is back; %d steps copied", copied)
        self._away = False
        return copied

    def finish(self, status: Status) -> bool:
        """Copy what is missing and end the MLflow run with `status`. If MLflow is away: False, and a line in
        the log."""
        try:
            self._sync()
            client, mlflow_run_id = self._ensure()
            with translated(self.uri):
                client.set_terminated(mlflow_run_id, status)
        except (TrackingUnavailable, StoreUnreachableError) as error:
            log.warning("MLflow does not know yet that run %s is %s: %s", self.run_id, status.lower(), error)
            return False
        return True

    def log_evaluation(self, verdict: Mapping[str, Any]) -> None:
        """Put a verdict's `metrics` (as `evaluation/...`, at its `step`) and its `word` into the run; doing it again
        changes nothing. Raises TrackingUnavailable."""
        client, mlflow_run_id = self._ensure()
        from mlflow.entities import Metric, RunTag

        step = int(verdict.get("step") or 0)
        timestamp = _milliseconds(verdict.get("time") or self._time_of(step))
        metrics = [
            Metric(name, value, timestamp, step) for name, value in _numbers(verdict.get("metrics") or {}, EVALUATION)
        ]
        with translated(self.uri):
            for batch in _chunks(metrics, _MAX_METRICS):
                client.log_batch(mlflow_run_id, metrics=batch)
            client.log_batch(mlflow_run_id, tags=[RunTag("holdfast.verdict", str(verdict["word"]))])

    def _miss(self, error: Exception) -> None:
        if not self._away:
            log.warning("metrics are not copied to MLflow for now, they are safe in the store: %s", error)
        self._away = True

    def _sync(self) -> int:
        if not (rows := read_history(self.store, self.run_id, after=self._last_step)):
            return 0
        client, mlflow_run_id = self._ensure()
        with translated(self.uri):
            run = client.get_run(mlflow_run_id)
            self._last_step = max(self._last_step, _last_step(run))
            rows = [row for row in rows if row["step"] > self._last_step]
            if rows and run.info.status != "RUNNING":
                client.update_run(mlflow_run_id, status="RUNNING")
            for batch, last_step in _batches(rows):
                client.log_batch(mlflow_run_id, metrics=batch)
                self._last_step = last_step
        return len(rows)

    def _ensure(self) -> tuple[MlflowClient, str]:
        """The client and the MLflow run, described; made at the first call that reaches MLflow."""
        if self._client is None or self._mlflow_run_id is None:
            client = connect(self.uri)
            with translated(self.uri):
                mlflow_run_id = _claim_run(client, self.spec, self.run_id, self.store, self.uri)
                self._describe(client, mlflow_run_id)
            self._client, self._mlflow_run_id = client, mlflow_run_id
        return self._client, self._mlflow_run_id

    def _describe(self, client: MlflowClient, mlflow_run_id: str) -> None:
        """Parameters, tags, the dataset and the spec. What an earlier attempt has logged as a parameter stays: MLflow
        does not change parameters, and what may differ between attempts cannot influence the weights."""
        from mlflow.entities import DatasetInput, InputTag, Param, RunTag
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        manifest = load_manifest(self.store, self.dataset_id)
        logged = client.get_run(mlflow_run_id).data.params
        params = [
            Param(key, value[:_MAX_PARAM_LENGTH])
            for key, value in _flat(self.spec.model_dump(mode="json"))
            if key not in logged
        ]
        for batch in _chunks(params, _MAX_PARAMS):
            client.log_batch(mlflow_run_id, params=batch)
        tags = whole_tags(client, mlflow_run_id, self._tags(manifest), _MAX_TAG_LENGTH)
        client.log_batch(mlflow_run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        context = InputTag("mlflow.data.context", "training")
        inputs = [DatasetInput(self._dataset_entity(manifest), [context])]
        try:
            client.log_inputs(mlflow_run_id, inputs)
        except (MlflowException, SQLAlchemyError):
            # MLflow looks for a dataset and then inserts it: another process may have inserted it in between, and then
            # the second look finds it.
            client.log_inputs(mlflow_run_id, inputs)
        client.log_text(mlflow_run_id, dump_spec(self.spec), "spec.yaml")

    def _tags(self, manifest: Manifest) -> dict[str, str]:
        tags = {
            "holdfast.version": metadata.version("holdfast"),
            "holdfast.store": redact(self.store.url),
            "holdfast.dataset_id": self.dataset_id,
            "holdfast.spec_digest": digest(self.spec.model_dump(mode="json")),
        }
        if revisions := dvc_revisions(manifest):
            tags["holdfast.dvc_revisions"] = json.dumps(revisions)
        if commit := git_commit():
            tags["mlflow.source.git.commit"] = commit
        return tags

    def _dataset_entity(self, manifest: Manifest) -> Dataset:
        from mlflow.entities import Dataset

        url = f"{redact(self.store.url)}/{layout.dataset(self.dataset_id)}"
        sources = {
            source.name: {"uri": redact(source.uri), **source.lineage.model_dump()} for source in manifest.sources
        }
        profile = {
            "train_tokens": manifest.tokens("train"),
            "validation_tokens": manifest.tokens("validation"),
            "sources": dict(list(sources.items())[:_MAX_PROFILE_SOURCES]),
        }
        return Dataset(
            name=self.spec.name,
            digest=self.dataset_id,
            source_type="holdfast",
            source=json.dumps({"uri": url}),
            profile=redact(json.dumps(profile)),
        )

    def _time_of(self, step: int) -> float:
        """When `step` was computed, in unix seconds; 0 if the history does not say."""
        return next((row["time"] for row in read_history(self.store, self.run_id, after=step - 1)), 0.0)


def git_commit() -> str | None:
    """The commit of the code: HOLDFAST_GIT_COMMIT, which the images set, else that of the Git repository around the
    working directory, with `-dirty` if files were changed; None if there is neither."""
    if commit := os.environ.get("HOLDFAST_GIT_COMMIT"):
        return commit
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def whole_tags(client: MlflowClient, mlflow_run_id: str, tags: Mapping[str, str], longest: int) -> dict[str, str]:
    """`tags`, none of more than `longest` characters: a longer text becomes an artifact of the MLflow run, whole, and
    its tag a JSON object (which is YAML too) that says where: `{"artifact": "runs:/<id>/lineage/<tag>"}`."""
    kept = dict(tags)
    for name, value in tags.items():
        if len(value) > longest:
            file = f"lineage/{name}"
            client.log_text(mlflow_run_id, value, file)
            kept[name] = json.dumps({"artifact": f"runs:/{mlflow_run_id}/{file}"})
    return kept


def dvc_revisions(manifest: Manifest) -> dict[str, str]:
    """URI to Git commit, for the sources that DVC tracks."""
    return {
        redact(source.uri): source.lineage.revision or "" for source in manifest.sources if source.lineage.kind == "dvc"
    }


def _claim_run(client: MlflowClient, spec: Spec, run_id: str, store: Store, uri: str) -> str:
    """The MLflow run that stands for `run_id`, made if there is none. Of several creators at once, the claim in the
    store lets one win; the others take its run and delete their own."""
    experiment_id = _experiment(client, spec.experiment, uri)
    key = layout.run(run_id, f"mlflow/{digest([redact(uri), spec.experiment])}.json")
    while True:
        try:
            data, version = store.get_versioned(key)
        except MissingError:
            version = None
        else:
            claimed = str(json.loads(data)["mlflow_run_id"])
            if _is_active(client, claimed):
                return claimed
        candidate = _tagged_run(client, experiment_id, run_id)
        created = candidate is None
        if candidate is None:
            tags = {RUN_ID_TAG: run_id}
            candidate = client.create_run(experiment_id, run_name=f"{spec.name}-{run_id[:8]}", tags=tags).info.run_id
            # A creator that died before its claim, or one on another store: the oldest run is the one.
            oldest = _tagged_run(client, experiment_id, run_id) or candidate
            if oldest != candidate:
                client.delete_run(candidate)
                candidate, created = oldest, False
        try:
            store.compare_and_swap(key, json.dumps({"mlflow_run_id": candidate}).encode(), version)
        except ConflictError:
            winner = json.loads(store.get(key))["mlflow_run_id"]
            if created and winner != candidate:
                client.delete_run(candidate)
            continue
        return candidate


def _experiment(client: MlflowClient, name: str, uri: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name, artifact_location=artifact_location(uri))
        except MlflowException:
            experiment = client.get_experiment_by_name(name)  # somebody else made it in between
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        raise TrackingUnavailable(
            f"registration.experiment: {name!r} is deleted in MLflow; restore it "
            f"(mlflow experiments restore --experiment-id {experiment.experiment_id}) or name another one"
        )
    return experiment.experiment_id


def _tagged_run(client: MlflowClient, experiment_id: str, run_id: str) -> str | None:
    """The oldest run of the experiment that carries the tag of `run_id`."""
    found = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_ID_TAG}` = '{run_id}'")
    return min(((run.info.start_time, run.info.run_id) for run in found), default=(0, None))[1]


def _is_active(client: MlflowClient, mlflow_run_id: str) -> bool:
    """Whether the run exists and nobody has deleted it in MLflow."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(mlflow_run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _last_step(run: Run) -> int:
    """The last step whose metrics are all in MLflow."""
    return max((metric.step for metric in run.data.to_proto().metrics if metric.key == "loss"), default=0)


def _batches(rows: Iterable[Row]) -> Iterator[tuple[list[Metric], int]]:
    """Batches that MLflow writes in one transaction, with the last step that is complete after each. No step is cut."""
    batch: list[Metric] = []
    last_step = 0
    for row in rows:
        metrics = _metrics(row)
        if batch and len(batch) + len(metrics) > _MAX_METRICS:
            yield batch, last_step
            batch = []
        batch += metrics
        last_step = row["step"]
    if batch:
        yield batch, last_step


def _metrics(row: Row) -> list[Metric]:
    from mlflow.entities import Metric

    values = {key: value for key, value in row.items() if key not in ("step", "time")}
    return [
        Metric(name.replace("system.", "system/", 1), value, _milliseconds(row["time"]), row["step"])
        for name, value in _numbers(values)
    ]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among `values`, nested ones with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


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


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
