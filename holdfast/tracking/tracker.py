"""The one MLflow run of a Holdfast run: a copy of the history in the store, which any process can make at any time.

Each run id has one MLflow run, with every step once. A step's metrics are written in one transaction, and the next copy
starts after the last step in MLflow. A row sent twice (same time, same values) is one row. An unreachable MLflow never
raises out of `sync` and `finish`, and artifacts that cannot be written keep no metric back. `holdfast.telemetry`
measures.

A sweep has one parent run, for any number of calls and callers, and a repeated call changes nothing. A trial in several
sweeps is a child of the one that was compared last: MLflow allows one parent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from holdfast.dataset.manifest import load_manifest
from holdfast.runtime.environment import tracking_page, tracking_uri
from holdfast.spec import Spec, digest
from holdfast.spec.errors import StoreUnreachableError
from holdfast.store import Store, layout
from holdfast.telemetry import Row, read_history
from holdfast.tracking.artifacts import write_text
from holdfast.tracking.claim import SWEEP_ID_TAG, claim, claim_run, claimed_run
from holdfast.tracking.connection import TrackingUnavailable, connect, translated
from holdfast.tracking.description import attach_spec, describe
from holdfast.tracking.interface import Status
from holdfast.tracking.registrations import registry_name

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

EVALUATION = "evaluation/"

ALL_STEPS = 10_000  # steps from the first that are all copied to MLflow; see `is_copied`
_MAX_METRICS = 1000  # per request: MLflow's own limit

log = logging.getLogger("holdfast.tracking")
MAX_TAG_LENGTH = 8000  # characters; MLflow's own
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own, by which its UI nests runs


@dataclass
class RunTracker:
    """The MLflow run of one Holdfast run: a `Tracker`. Create it with `open`, which makes no request: MLflow may be
    unreachable."""

    name: ClassVar[str] = "MLflow"

    spec: Spec
    run_id: str
    dataset_id: str
    store: Store
    uri: str
    _client: MlflowClient | None = None
    _mlflow_run_id: str | None = None
    _last_step: int = 0  # every step up to it is in MLflow, or is not copied
    _away: bool = field(default=False, repr=False)
    _attached: bool | None = field(default=None, repr=False)  # the spec as an artifact; None: not tried yet

    @classmethod
    def open(cls, spec: Spec, run_id: str, dataset_id: str, store: Store, uri: str | None = None) -> RunTracker:
        """The tracker of `run_id` at `uri` (default: `tracking_uri()`)."""
        return cls(spec=spec, run_id=run_id, dataset_id=dataset_id, store=store, uri=uri or tracking_uri())

    @property
    def mlflow_run_id(self) -> str:
        """MLflow's id of the run, which is created if there is none. Raises TrackingUnavailable."""
        return self._ensure()[1]

    def page(self) -> str:
        """The run's page for a browser; the run is created if there is none. Empty for an MLflow without a server.
        Raises TrackingUnavailable."""
        root = tracking_page()
        if not root:
            return ""
        client = connect(self.uri)
        with translated(self.uri):
            mlflow_run_id = claim_run(client, self.spec, self.run_id, self.store, self.uri)
            experiment = client.get_run(mlflow_run_id).info.experiment_id
        return f"{root}/#/experiments/{experiment}/runs/{mlflow_run_id}"

    def begin(self) -> None:
        """Create the MLflow run, as running, before its first metrics. Never raises because MLflow or the store is
        unreachable."""
        try:
            client, mlflow_run_id = self._ensure()
            with translated(self.uri):
                client.update_run(mlflow_run_id, status="RUNNING")
        except (TrackingUnavailable, StoreUnreachableError) as error:
            self._miss(error)

    def sync(self) -> int:
        """Copy the steps that MLflow does not have yet. Return their number. Never raises because MLflow or the store
        is unreachable: that is logged once, and the next call catches up."""
        try:
            copied = self._sync()
        except (TrackingUnavailable, StoreUnreachableError) as error:
            self._miss(error)
            return 0
        if self._away:
            log.info("MLflow is back; %d steps copied", copied)
        self._away = False
        if self._client is not None and self._attached is None:
            self._attach()
        return copied

    def finish(self, status: Status) -> bool:
        """Copy the missing steps and end the MLflow run with `status`. If MLflow is unreachable, return False and log
        it."""
        try:
            self._sync()
            client, mlflow_run_id = self._ensure()
            with translated(self.uri):
                client.set_terminated(mlflow_run_id, status)
        except (TrackingUnavailable, StoreUnreachableError) as error:
            log.warning("MLflow does not know yet that run %s is %s: %s", self.run_id, status.lower(), error)
            return False
        if not self._attached:
            self._attach()
        return True

    def log_evaluation(self, verdict: Mapping[str, Any]) -> None:
        """Write a verdict's `metrics` (as `evaluation/...`, at its `step`) and its `word` into the run; repeating it
        changes nothing. Raises TrackingUnavailable."""
        client, mlflow_run_id = self._ensure()
        from mlflow.entities import Metric, RunTag

        step = int(verdict.get("step") or 0)
        timestamp = _milliseconds(verdict.get("time") or self._time_of(step))
        metrics = [
            Metric(name, value, timestamp, step) for name, value in numbers(verdict.get("metrics") or {}, EVALUATION)
        ]
        with translated(self.uri):
            client.log_batch(mlflow_run_id, metrics=metrics)
            client.log_batch(mlflow_run_id, tags=[RunTag("holdfast.verdict", str(verdict["word"]))])

    def log_figures(self, figures: Mapping[str, float]) -> None:
        """Write figures of the whole run into it, such as its goodput and its cost. Repeating it only updates figures
        that have grown. Raises TrackingUnavailable."""
        client, mlflow_run_id = self._ensure()
        from mlflow.entities import Metric

        now = _milliseconds(time.time())
        with translated(self.uri):
            client.log_batch(mlflow_run_id, metrics=[Metric(name, value, now, 0) for name, value in figures.items()])

    def _attach(self) -> None:
        """Write the artifacts, after the metrics. An artifact that cannot be written is a warning, once: the store has
        it."""
        client, mlflow_run_id = self._ensure()
        before, self._attached = self._attached, False
        try:
            with translated(self.uri):
                attach_spec(client, mlflow_run_id, self.spec)
            self._attached = True
        except TrackingUnavailable as error:
            if before is None:
                log.warning("the artifact spec.yaml is not in MLflow, the metrics are: %s", error)

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
            copied = [row for row in rows if is_copied(row["step"], self.spec.training.steps)]
            for batch, last_step in _batches(copied):
                client.log_batch(mlflow_run_id, metrics=batch)
                self._last_step = last_step
        if rows:
            self._last_step = int(rows[-1]["step"])  # no row after the last copied one is copied
        return len(copied)

    def _ensure(self) -> tuple[MlflowClient, str]:
        """The client and the described MLflow run, created at the first call that reaches MLflow."""
        if self._client is None or self._mlflow_run_id is None:
            client = connect(self.uri)
            with translated(self.uri):
                mlflow_run_id = claim_run(client, self.spec, self.run_id, self.store, self.uri)
                manifest = load_manifest(self.store, self.dataset_id) if self.dataset_id else None
                describe(client, mlflow_run_id, self.spec, manifest, self.store)
            self._client, self._mlflow_run_id = client, mlflow_run_id
        return self._client, self._mlflow_run_id

    def _time_of(self, step: int) -> float:
        """When `step` was computed, in Unix seconds; 0 if the history does not have it."""
        return next((row["time"] for row in read_history(self.store, self.run_id, after=step - 1)), 0.0)


def is_copied(step: int, steps: int) -> bool:
    """Whether MLflow gets the metrics of a step of a run with this many `steps`. It gets each of the first ALL_STEPS,
    every second one of as many after them, every fourth one of twice as many after those, and so on. It always gets the
    last one. So a run of a million steps has 43,000 points of each metric. The selection depends on the step alone."""
    stride = 1 << ((step - 1) // ALL_STEPS).bit_length()
    return step == steps or step % stride == 0


def _last_step(run: Run) -> int:
    """The last step whose metrics are all in MLflow. Every row has a learning rate; one whose update was held back may
    have no loss."""
    metrics = run.data.to_proto().metrics
    return max((metric.step for metric in metrics if metric.key == "learning_rate"), default=0)


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

    when = _milliseconds(row["time"])
    return [Metric(name, value, when, row["step"]) for name, value in metrics_of(row).items()]


def metrics_of(row: Row) -> dict[str, float]:
    """The metrics of a row of the history, by the names that trackers show."""
    values = {key: value for key, value in row.items() if key not in ("step", "time")}
    return {name.replace("system.", "system/", 1): value for name, value in numbers(values)}


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers among `values`, nested ones with dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)


@dataclass(frozen=True)
class SweepRun:
    """The data of a sweep for MLflow."""

    sweep_id: str
    name: str
    runs: Sequence[str]  # runs of all trials
    tags: Mapping[str, str]  # a value that is too long for MLflow is cut
    metrics: Mapping[str, float]
    files: Mapping[str, str]  # name: text


def mirror_sweep(spec: Spec, found: SweepRun, store: Store, uri: str | None = None) -> str:
    """Write the parent run of a sweep to MLflow, with its trials as children. Return its MLflow id. `spec`: that of the
    sweep, without the changes of any trial. Trials that are not in MLflow are left out. Raises TrackingUnavailable."""
    uri = uri or tracking_uri()
    client = connect(uri)
    with translated(uri):
        key = layout.sweep(found.sweep_id, f"mlflow/{digest([registry_name(uri), spec.experiment])}.json")
        parent = claim(client, spec.experiment, uri, store, key, SWEEP_ID_TAG, found.sweep_id, found.name)
        _describe(client, parent, found)
        for run_id in found.runs:
            child = claimed_run(client, spec, run_id, store, uri)
            if child is not None and client.get_run(child).data.tags.get(PARENT_TAG) != parent:
                client.set_tag(child, PARENT_TAG, parent)
        if client.get_run(parent).info.status != "FINISHED":
            client.set_terminated(parent, "FINISHED")
        for name, text in found.files.items():  # last: this machine may lack access to MLflow's artifacts
            write_text(client, parent, text, name)
    return parent


def _describe(client: MlflowClient, parent: str, found: SweepRun) -> None:
    """Write the values that differ from MLflow's."""
    there = client.get_run(parent).data
    for name, text in found.tags.items():
        value = text[:MAX_TAG_LENGTH]
        if there.tags.get(name) != value:
            client.set_tag(parent, name, value)
    for name, number in found.metrics.items():
        if math.isfinite(number) and there.metrics.get(name) != number:
            client.log_metric(parent, name, number)
