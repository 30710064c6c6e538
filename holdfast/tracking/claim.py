"""The claim of an MLflow run for a Holdfast run: exactly one, for any number of concurrent callers.

The claim is an object of the store, written by compare-and-swap: MLflow has no unique names for runs.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.spec import Spec, digest
from holdfast.spec.errors import DataError, ExitCode, MissingError
from holdfast.spec.json_parsing import parse_json
from holdfast.store import ConflictError, Store, layout
from holdfast.store.json_reading import read_json
from holdfast.tracking.connection import TrackingUnavailable, artifact_location
from holdfast.tracking.preflight import deleted
from holdfast.tracking.registrations import registry_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_ID_TAG, SWEEP_ID_TAG = "holdfast.run_id", "holdfast.sweep_id"


def claim_run(client: MlflowClient, spec: Spec, run_id: str, store: Store, uri: str) -> str:
    """The MLflow run for `run_id`, created if there is none: see `claim`."""
    key, name = _key(spec, run_id, uri), f"{spec.name}-{run_id[:8]}"
    return claim(client, spec.experiment, uri, store, key, RUN_ID_TAG, run_id, name)


@dataclass(frozen=True)
class _Claim:
    """The record that names the MLflow run of a run."""

    mlflow_run_id: str


def claimed_run(client: MlflowClient, spec: Spec, run_id: str, store: Store, uri: str) -> str | None:
    """The MLflow run for `run_id`; None where there is none."""
    try:
        mlflow_run_id = read_json(store, _key(spec, run_id, uri), _Claim).mlflow_run_id
    except (MissingError, DataError):
        return None
    return mlflow_run_id if _is_active(client, mlflow_run_id) else None


def _key(spec: Spec, run_id: str, uri: str) -> str:
    return layout.run(run_id, f"mlflow/{digest([registry_name(uri), spec.experiment])}.json")


def claim(
    client: MlflowClient, experiment: str, uri: str, store: Store, key: str, tag: str, value: str, name: str
) -> str:
    """The MLflow run that carries `tag` with `value`, created under `name` if there is none. Of several concurrent
    creators, the claim under `key` in the store lets one win. The losers take its run and delete their own."""
    experiment_id = _experiment(client, experiment, uri)
    while True:
        try:
            data, version = store.get_versioned(key)
        except MissingError:
            version = None
        else:
            with contextlib.suppress(DataError):  # a damaged claim is replaced
                mlflow_run_id = parse_json(data, _Claim, f"{store.url}/{key}").mlflow_run_id
                if _is_active(client, mlflow_run_id):
                    return mlflow_run_id
        candidate = _tagged_run(client, experiment_id, tag, value)
        created = candidate is None
        if candidate is None:
            candidate = client.create_run(experiment_id, run_name=name, tags={tag: value}).info.run_id
            # A creator may have died before its claim, or use another store: the oldest run wins.
            oldest = _tagged_run(client, experiment_id, tag, value) or candidate
            if oldest != candidate:
                client.delete_run(candidate)
                candidate, created = oldest, False
        try:
            store.compare_and_swap(key, json.dumps({"mlflow_run_id": candidate}).encode(), version)
        except ConflictError:
            winner = read_json(store, key, _Claim).mlflow_run_id
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
            experiment = client.get_experiment_by_name(name)  # another process created it in between
            if experiment is None:
                raise
    if experiment.lifecycle_stage != "active":
        failure = TrackingUnavailable(deleted(name, experiment.experiment_id))
        failure.exit_code = ExitCode.NOT_FOUND
        raise failure
    return experiment.experiment_id


def _tagged_run(client: MlflowClient, experiment_id: str, tag: str, value: str) -> str | None:
    """The oldest run of the experiment that carries the tag with that value."""
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{tag}` = '{value}'")
    return min(((run.info.start_time, run.info.run_id) for run in runs), default=(0, None))[1]


def _is_active(client: MlflowClient, mlflow_run_id: str) -> bool:
    """Whether the run exists and was not deleted in MLflow."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(mlflow_run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
