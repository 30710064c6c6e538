"""The parent run of a sweep in a real MLflow, with its trials below it; repeated writes add nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from holdfast.store import Store
from holdfast.tracking import RunTracker, TrackingUnavailable, connect
from holdfast.tracking.tracker import PARENT_TAG, SweepRun, mirror_sweep
from tests.ports import free_port
from tests.tracking import made

SWEEP = SweepRun(
    "5eeb5eeb5eeb5eeb", "story-sweep", [made.RUN_ID, made.OTHER, "9" * 16], {"holdfast.best_run_id": made.RUN_ID},
    {"best/loss": 1.25}, {"comparison.md": "| a |\n"},
)  # fmt: skip


def trial(store: Store, run_id: str) -> str:
    tracker = RunTracker.open(made.spec(), run_id, made.DATASET_ID, store)
    assert tracker.finish("FINISHED")
    return tracker.mlflow_run_id


def everything(client: MlflowClient) -> list[object]:
    (experiment,) = (candidate for candidate in client.search_experiments() if candidate.name == made.spec().experiment)
    return [run.to_dictionary() for run in client.search_runs([experiment.experiment_id])]


def test_the_trials_are_children_of_one_parent_which_has_the_comparison_and_doing_it_again_changes_nothing(
    home: Path, store: Store
) -> None:
    children = [trial(store, run_id) for run_id in (made.RUN_ID, made.OTHER)]
    parent = mirror_sweep(made.spec(), SWEEP, store)
    client = connect()
    run = client.get_run(parent)
    assert (run.info.run_name, run.info.status) == ("story-sweep", "FINISHED")
    assert run.data.tags["holdfast.sweep_id"] == SWEEP.sweep_id
    assert run.data.tags["holdfast.best_run_id"] == made.RUN_ID
    assert run.data.metrics == {"best/loss": 1.25}
    assert [file.path for file in client.list_artifacts(parent)] == ["comparison.md"]
    assert [client.get_run(child).data.tags[PARENT_TAG] for child in children] == [parent, parent]
    before = everything(client)
    assert len(before) == 3  # the third trial never began, and has no run
    assert mirror_sweep(made.spec(), SWEEP, store) == parent
    assert everything(client) == before
    assert len(client.get_metric_history(parent, "best/loss")) == 1


def test_a_sweep_run_is_updated_and_another_sweep_adopts_its_trials(home: Path, store: Store) -> None:
    child = trial(store, made.RUN_ID)
    parent = mirror_sweep(made.spec(), SWEEP, store)
    better = replace(SWEEP, tags={"holdfast.best_run_id": made.OTHER}, metrics={"best/loss": 1.0})
    assert mirror_sweep(made.spec(), better, store) == parent
    client = connect()
    run = client.get_run(parent)
    assert (run.data.tags["holdfast.best_run_id"], run.data.metrics["best/loss"]) == (made.OTHER, 1.0)
    other = mirror_sweep(made.spec(), replace(SWEEP, sweep_id="0" * 16), store)
    assert other != parent
    assert client.get_run(child).data.tags[PARENT_TAG] == other


def test_an_unreachable_mlflow_is_reported_with_a_remedy(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingUnavailable, match="check MLFLOW_TRACKING_URI"):
        mirror_sweep(made.spec(), SWEEP, store, f"http://127.0.0.1:{free_port()}")
