"""The MLflow run of a sweep: the parent of its trials' runs, with the results of the comparison.

Each sweep has one parent, for any number of calls and callers, and a repeated call changes nothing. A trial in several
sweeps is a child of the one that was compared last: MLflow allows one parent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.runtime.environment import tracking_uri
from holdfast.spec import Spec, digest
from holdfast.store import Store, layout
from holdfast.tracking.artifacts import write_text
from holdfast.tracking.claim import SWEEP_ID_TAG, claim, claimed_run
from holdfast.tracking.connection import connect, translated
from holdfast.tracking.registrations import registry_name

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_TAG_LENGTH = 8000  # characters; MLflow's own
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own, by which its UI nests runs


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
