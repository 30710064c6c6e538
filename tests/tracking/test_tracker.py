"""The mirror in MLflow: one run, every step once, whichever process dies and however many copy concurrently."""

import json
import logging
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from holdfast.runtime.environment import tracking_uri
from holdfast.store import Store
from holdfast.tracking import RunTracker, TrackingUnavailable, claim, connect
from holdfast.tracking import tracker as tracker_module
from holdfast.tracking.artifacts import git_commit, whole_tags
from holdfast.tracking.tracker import is_copied
from tests import warm
from tests.ports import free_port
from tests.telemetry.histories import write_committed
from tests.tracking import made
from tests.tracking.conftest import mlflow_server


def opened(store: Store, *overrides: str, uri: str | None = None) -> RunTracker:
    return RunTracker.open(made.spec(*overrides), made.RUN_ID, made.DATASET_ID, store, uri)


def assert_holds_each_step_once(tracker: RunTracker, upto: int) -> None:
    client = connect(tracker.uri)
    for key in made.KEYS:
        history = client.get_metric_history(tracker.mlflow_run_id, key)
        metric_name = key.replace("system/", "system.")
        assert [(metric.step, metric.timestamp, metric.value) for metric in history] == [
            (row["step"], round(row["time"] * 1000), row[metric_name]) for row in made.rows(1, upto)
        ]


def start(store: Store, *batches: str) -> subprocess.Popen[str]:
    process = warm.popen(
        [sys.executable, "-m", "tests.tracking.worker", store.url, *batches],
        os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


def test_the_mlflow_run_has_the_parameters_tags_and_dataset_of_the_run(
    home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made.write_history(store, 0, 3)
    tracker = opened(store, "training.steps=77")
    assert tracker.sync() == 3
    assert tracker.finish("FINISHED")
    client = connect()
    run = client.get_run(tracker.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["training.steps"] == "77"
    assert run.data.params["data.sources.0.uri"] == "corpus/*.txt"
    assert run.data.tags["holdfast.run_id"] == made.RUN_ID
    assert run.data.tags["holdfast.dataset_id"] == made.DATASET_ID
    assert run.data.tags["holdfast.dvc_revisions"] == f'{{"dvc:corpus": "{"c" * 40}"}}'
    assert run.data.tags["holdfast.store"] == store.url
    [dataset] = run.inputs.dataset_inputs
    assert dataset.dataset.digest == made.DATASET_ID
    assert [file.path for file in client.list_artifacts(tracker.mlflow_run_id)] == ["spec.yaml"]
    assert (home / "mlflow-artifacts").is_dir()
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
def test_syncing_again_and_from_elsewhere_copies_only_what_is_new(home: Path, store: Store) -> None:
    made.write_history(store, 0, 400)  # more than two batches
    tracker = opened(store)
    assert tracker.sync() == 400
    assert tracker.sync() == 0
    made.write_history(store, 400, 410)
    other = opened(store)
    assert other.sync() == 10
    assert tracker.sync() == 0
    assert_holds_each_step_once(tracker, 410)


def test_a_long_run_is_copied_with_a_growing_stride_and_its_last_step(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "ALL_STEPS", 8)
    expected = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 41]
    made.write_history(store, 0, 13)
    first = opened(store, "training.steps=41")
    assert first.sync() == 10
    made.write_history(store, 13, 41)
    assert opened(store, "training.steps=41").sync() == len(expected) - 10
    assert first.sync() == 0
    client = connect(first.uri)
    assert [metric.step for metric in client.get_metric_history(first.mlflow_run_id, "learning_rate")] == expected
    monkeypatch.undo()
    assert sum(is_copied(step, 10**6) for step in range(1, 10**6 + 1)) < 45_000


def test_a_step_without_a_loss_is_not_copied_again(home: Path, store: Store) -> None:
    rows = made.rows(1, 3)
    rows[-1] |= {"loss": None, "grad_norm": None, "held": 1}
    write_committed(store, made.RUN_ID, 0, rows)
    assert opened(store).sync() == 3
    assert opened(store).sync() == 0


def test_a_resumed_run_is_running_again_and_keeps_its_first_parameters(home: Path, store: Store) -> None:
    first = opened(store, "checkpoint.every_steps=50")
    made.write_history(store, 0, 2)
    first.sync()
    first.finish("FAILED")
    second = opened(store, "checkpoint.every_steps=20")
    second.begin()
    assert connect().get_run(second.mlflow_run_id).info.status == "RUNNING"  # before there is anything new to copy
    made.write_history(store, 2, 4)
    assert second.sync() == 2
    run = connect().get_run(second.mlflow_run_id)
    assert run.info.run_id == first.mlflow_run_id
    assert run.info.status == "RUNNING"
    assert run.data.params["checkpoint.every_steps"] == "50"
    assert second.finish("FINISHED")
    assert opened(store).sync() == 0
    assert connect().get_run(second.mlflow_run_id).info.status == "FINISHED"
    assert_holds_each_step_once(second, 4)


def test_a_value_above_mlflows_limit_is_cut(home: Path, store: Store) -> None:
    tracker = opened(store, f"data.sources.0.uri={'x' * 7000}")
    run = connect().get_run(tracker.mlflow_run_id)
    assert run.data.params["data.sources.0.uri"] == "x" * 6000


def test_numbers_that_are_not_finite_are_copied(home: Path, store: Store) -> None:
    row = {"step": 1, "time": 1.5, "loss": math.nan, "grad_norm": math.inf, "learning_rate": 0.1}
    write_committed(store, made.RUN_ID, 0, [row])
    tracker = opened(store)
    assert tracker.sync() == 1
    assert opened(store).sync() == 0
    [loss] = connect().get_metric_history(tracker.mlflow_run_id, "loss")
    assert math.isnan(loss.value)


@pytest.mark.slow
def test_concurrent_trackers_of_a_new_mlflow_share_one_run(bare_home: Path, store: Store) -> None:
    made.write_history(store, 0, 300)
    processes = [start(store), start(store), start(store)]
    go(*processes)
    answers = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    names = {output.split()[1] for output, _ in answers}
    assert len(names) == 1, answers
    tracker = opened(store)
    assert {tracker.mlflow_run_id} == names
    experiment = connect().get_experiment_by_name("story")
    assert [run.info.run_id for run in connect().search_runs([experiment.experiment_id])] == list(names)
    tracker.sync()
    assert_holds_each_step_once(tracker, 300)


@pytest.mark.slow
def test_a_syncer_killed_in_the_middle_leaves_neither_gaps_nor_duplicates(home: Path, store: Store) -> None:
    last_step = 1000  # six batches
    made.write_history(store, 0, last_step)
    database = home / "mlflow.db"
    for _ in range(2):
        before = count_metrics(database)
        process = start(store, "2")  # at most one, however late it is killed
        go(process)
        while count_metrics(database) == before:
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert 0 < count_metrics(database) < last_step * len(made.KEYS)
    tracker = opened(store)
    assert tracker.sync() > 0
    assert_holds_each_step_once(tracker, last_step)


def count_metrics(database: Path) -> int:
    # It may have to roll back a write that a kill interrupted.
    with sqlite3.connect(f"file:{database}?mode=rw", uri=True, timeout=120) as connection:
        return int(connection.execute("select count(*) from metrics").fetchone()[0])


def test_a_run_deleted_in_mlflow_is_recreated(home: Path, store: Store) -> None:
    made.write_history(store, 0, 5)
    first = opened(store)
    first.sync()
    connect().delete_run(first.mlflow_run_id)
    second = opened(store)
    assert second.sync() == 5
    assert second.mlflow_run_id != first.mlflow_run_id
    assert_holds_each_step_once(second, 5)


def test_a_run_of_a_creator_that_died_before_its_claim_is_adopted(home: Path, store: Store) -> None:
    client = connect()
    experiment = client.create_experiment("story", artifact_location=(home / "artifacts").as_uri())
    orphan = client.create_run(experiment, tags={"holdfast.run_id": made.RUN_ID})
    assert opened(store).mlflow_run_id == orphan.info.run_id


def test_the_claim_settles_what_the_search_does_not_see(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_run = MlflowClient.create_run
    winners = []

    def overtaken(*arguments: object, **named: object) -> object:
        monkeypatch.setattr(MlflowClient, "create_run", create_run)
        winners.append(opened(store).mlflow_run_id)
        return create_run(*arguments, **named)

    monkeypatch.setattr(MlflowClient, "create_run", overtaken)
    monkeypatch.setattr(claim, "_tagged_run", lambda *_: None)
    assert [opened(store).mlflow_run_id] == winners
    experiment = connect().get_experiment_by_name("story")
    assert [run.info.run_id for run in connect().search_runs([experiment.experiment_id])] == winners


def test_logging_an_evaluation_twice_changes_nothing(home: Path, store: Store) -> None:
    made.write_history(store, 0, 8)
    tracker = opened(store)
    verdict = {"word": "blessed", "step": 8, "metrics": {"loss": 1.25, "perplexity": 3.5, "note": "text"}}
    tracker.log_evaluation(verdict)
    opened(store).log_evaluation(verdict)
    client = connect()
    run = client.get_run(tracker.mlflow_run_id)
    assert run.data.tags["holdfast.verdict"] == "blessed"
    assert {key: value for key, value in run.data.metrics.items() if key.startswith("evaluation/")} == {
        "evaluation/loss": 1.25,
        "evaluation/perplexity": 3.5,
    }
    assert [m.step for m in client.get_metric_history(tracker.mlflow_run_id, "evaluation/loss")] == [8]
    assert tracker.sync() == 8  # an evaluation does not look like a copied step


def test_the_figures_of_a_run_are_its_newest_ones(home: Path, store: Store) -> None:
    tracker = opened(store)
    tracker.log_figures({"goodput": 0.5, "cost/price": 2.0})
    tracker.log_figures({"goodput": 0.75, "cost/price": 3.0})
    assert connect().get_run(tracker.mlflow_run_id).data.metrics == {"goodput": 0.75, "cost/price": 3.0}


@pytest.mark.slow
def test_a_server_that_restarts_has_every_step_once(
    tmp_path: Path, bare_home: Path, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    caplog.set_level(logging.INFO, "holdfast")
    tracker = opened(store, uri=f"http://127.0.0.1:{port}")
    made.write_history(store, 0, 100)
    start = time.monotonic()
    assert tracker.sync() == 0
    assert time.monotonic() - start < 100  # MLflow itself retries each request for four minutes
    for pause in ("FACTOR", "JITTER"):  # between two tries
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_BACKOFF_{pause}", "0")
    assert tracker.sync() == 0
    assert not tracker.finish("FAILED")
    assert len([record for record in caplog.records if "are not copied to MLflow for now" in record.message]) == 1
    with mlflow_server(tmp_path, port):
        assert tracker.sync() == 100
        assert "MLflow is back" in caplog.text
    made.write_history(store, 100, 300)
    assert tracker.sync() == 0
    with mlflow_server(tmp_path, port):
        assert tracker.sync() == 200
        assert opened(store, uri=tracker.uri).sync() == 0
        assert_holds_each_step_once(tracker, 300)
        assert tracker.finish("FINISHED")


def test_credentials_never_show(bare_home: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://person:hunter2@127.0.0.1:{free_port()}"
    with pytest.raises(TrackingUnavailable) as error:
        assert opened(store, uri=uri).mlflow_run_id
    assert "MLFLOW_TRACKING_URI" in str(error.value)
    assert "hunter2" not in str(error.value)


def test_the_commit_is_the_one_that_the_image_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # outside any Git repository
    monkeypatch.delenv("HOLDFAST_GIT_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None
    monkeypatch.setenv("HOLDFAST_GIT_COMMIT", "c" * 40)
    assert git_commit() == "c" * 40


def test_a_document_too_long_for_a_tag_is_stored_as_an_artifact(home: Path, store: Store) -> None:
    tracker = opened(store)
    client, mlflow_run_id = connect(), tracker.mlflow_run_id
    long = json.dumps({str(number): "x" * 60 for number in range(100)})
    tags = whole_tags(client, mlflow_run_id, {"short": "as it is", "holdfast.sources": long}, 5000)
    assert tags["short"] == "as it is"
    place = json.loads(tags["holdfast.sources"])["artifact"]
    assert place == f"runs:/{mlflow_run_id}/lineage/holdfast.sources"
    path = client.download_artifacts(mlflow_run_id, "lineage/holdfast.sources", str(home))
    assert Path(path).read_text(encoding="utf-8") == long


@pytest.mark.slow
def test_mlflow_prints_nothing_and_sends_no_telemetry(bare_home: Path) -> None:
    code = (
        "from holdfast.runtime.logs import configure_logging; configure_logging()\n"
        "from holdfast.tracking import connect; connect()\n"
        "from mlflow.telemetry.client import get_telemetry_client\n"
        "assert get_telemetry_client() is None"
    )
    cut = ("PYTEST", "CI", "MLFLOW", "DO_NOT_TRACK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(cut)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_importing_the_package_does_not_import_mlflow() -> None:
    code = (
        "import sys, holdfast.tracking, holdfast.components.register, holdfast.components.notify\n"
        "assert not {'mlflow', 'torch', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_while_the_database_is_made_leaves_none(bare_home: Path) -> None:
    code = """if True:
        from sqlalchemy import event
        from sqlalchemy.engine import Engine

        @event.listens_for(Engine, "connect")
        def small(connection, _):
            connection.execute("PRAGMA max_page_count=20")

        from holdfast.spec import HoldfastError
        from holdfast.tracking import connect
        try:
            connect()
        except HoldfastError as error:
            print(int(error.exit_code), error)
    """
    result = warm.run([sys.executable, "-c", code], os.environ)
    assert re.match("205 .*disk is full; free some space", result.stdout)
    assert [path.name for path in bare_home.iterdir()] == ["mlflow.db.lock"]
    assert connect().search_experiments()


def test_an_unopenable_mlflow_database_is_reported_without_retries(bare_home: Path) -> None:
    (bare_home / "mlflow.db").mkdir()
    started = time.monotonic()
    with pytest.raises(TrackingUnavailable, match="unable to open database file"):
        connect()
    assert time.monotonic() - started < 100  # MLflow itself retries for two minutes


def test_the_default_is_a_file_below_the_home(bare_home: Path) -> None:
    assert tracking_uri() == f"sqlite:///{bare_home / 'mlflow.db'}"
