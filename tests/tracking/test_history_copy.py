"""Weights & Biases and Trackio have each committed row once, as their own readers read it, after any kill."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast.spec import SpecError
from holdfast.spec.errors import MissingError
from holdfast.spec.tree import require_trackers
from holdfast.store import Store
from holdfast.tracking import Tracker, TrackingUnavailable, open_all
from tests.seeds import in_full
from tests.tracking import made

KILLS = 10
WORD = {"step": 6, "word": "blessed", "metrics": {"loss": 2.5}}


@pytest.fixture(autouse=True)
def places(bare_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trackers write under the folder of the test, and nothing is sent."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def opened(name: str, store: Store) -> Tracker:
    pytest.importorskip(name)
    (tracker,) = open_all(made.spec(f"telemetry.trackers=[{name}]"), made.RUN_ID, made.DATASET_ID, store)
    return tracker


def wandb_records(tmp_path: Path) -> list[Any]:
    """The records of all folders, in the order of the folders, by W&B's own reader."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    records = []
    for path in sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{made.RUN_ID}.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            records.append(record)
    return records


def wandb_rows(tmp_path: Path) -> list[dict[str, float]]:
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(tmp_path)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_figures(tmp_path: Path, name: str) -> list[Any]:
    updates = [item for record in wandb_records(tmp_path) for item in record.summary.update]
    return [json.loads(item.value_json) for item in updates if item.key == name or list(item.nested_key) == [name]]


def trackio_rows(tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of the run, in a process of its own: Trackio reads TRACKIO_DIR when it is imported."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s;"
        f"print(json.dumps(s.get_logs('story', 'story-{made.RUN_ID[:8]}', run_id='{made.RUN_ID}')))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return json.loads(output)


def expected(upto: int) -> list[tuple[int, float, list[float]]]:
    return [
        (row["step"], row["time"], [row[key.replace("system/", "system.")] for key in made.KEYS])
        for row in made.rows(1, upto)
    ]


def run_copier(store: Store, name: str, points: int = 0) -> None:
    """Copy in another process, which is killed at that point if one is given."""
    command = [sys.executable, "-m", "tests.tracking.copier", store.url, name, str(points)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    if points:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=120) == (-signal.SIGKILL if points else 0)


@pytest.mark.drill
def test_wandb_has_each_row_once_after_ten_kills(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    copied = 0
    for kill in range(1, KILLS + 1):
        made.write_history(store, kill - 1, kill)
        run_copier(store, "wandb", points=kill - copied)
        if kill in (3, 6, KILLS):
            run_copier(store, "wandb")
            copied = kill
    rows = wandb_rows(tmp_path)
    assert [(row["_step"], row["_timestamp"], [row[key] for key in made.KEYS]) for row in rows] == expected(KILLS)
    assert not list((tmp_path / "wandb").glob(".*.part"))


@pytest.mark.drill
@in_full
def test_trackio_has_each_row_once_after_ten_kills(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    for kill in range(1, KILLS + 1):
        made.write_history(store, 3 * (kill - 1), 3 * kill)
        run_copier(store, "trackio", points=1 + kill % 2)
    run_copier(store, "trackio")
    rows = trackio_rows(tmp_path)
    found: list[object] = [
        (row["step"], datetime.fromisoformat(row["timestamp"]).timestamp(), [row[key] for key in made.KEYS])
        for row in rows
    ]
    assert [(step, pytest.approx(when, abs=1e-6), values) for step, when, values in expected(3 * KILLS)] == found


@pytest.mark.slow
def test_a_row_that_no_checkpoint_commits_is_not_copied(store: Store, tmp_path: Path) -> None:
    made.write_history(store, 0, 2)
    tracker = opened("wandb", store)
    store.put(f"runs/{made.RUN_ID}/metrics/000000002-000000003.000001.jsonl", b'{"step":3,"time":1.0,"loss":1.0}\n')
    assert tracker.finish("FINISHED")
    assert [row["_step"] for row in wandb_rows(tmp_path)] == [1, 2]


def test_a_verdict_and_figures_are_in_the_summary_once(store: Store, tmp_path: Path) -> None:
    made.write_history(store, 0, 2)
    opened("wandb", store).log_evaluation(WORD)
    opened("wandb", store).log_evaluation(WORD)
    opened("wandb", store).log_figures({"goodput": 0.5})
    assert Counter(wandb_figures(tmp_path, "holdfast.verdict")) == {"blessed": 1}
    assert wandb_figures(tmp_path, "evaluation/loss") == [2.5]
    assert wandb_figures(tmp_path, "goodput") == [0.5]
    assert [row["_step"] for row in wandb_rows(tmp_path)] == [1, 2]  # which the first verdict brought along


def test_an_offline_copy_waits_for_its_interval_but_the_end_does_not(store: Store, tmp_path: Path) -> None:
    made.write_history(store, 0, 2)
    tracker = opened("wandb", store)
    assert tracker.sync() == 0
    assert tracker.finish("FINISHED")
    assert len(wandb_rows(tmp_path)) == 2


def test_a_tracker_that_fails_is_one_warning_and_the_next_copy_has_all(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made.write_history(store, 0, 2)
    tracker = opened("wandb", store)
    (tmp_path / "wandb").write_text("a file where the folder should be")
    assert not tracker.finish("FAILED")
    assert not tracker.finish("FAILED")
    assert [record.message for record in caplog.records if "not copied to Weights & Biases" in record.message] == [
        record.message for record in caplog.records if "safe in the store" in record.message
    ]
    assert caplog.text.count("safe in the store") == 1
    with pytest.raises(TrackingUnavailable, match="Weights & Biases: "):
        tracker.log_evaluation(WORD)
    (tmp_path / "wandb").unlink()
    assert tracker.finish("FINISHED")
    assert len(wandb_rows(tmp_path)) == 2


def test_a_tracker_whose_package_is_missing_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = made.spec("telemetry.trackers=[mlflow,wandb]")
    monkeypatch.setattr("holdfast.spec.errors.find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(MissingError, match=r"telemetry.trackers: wandb .*pip install 'holdfast\[wandb\]'.*or remove"):
        require_trackers(spec)


def test_trackers_are_each_listed_once_and_none_copies_nowhere(store: Store) -> None:
    with pytest.raises(SpecError, match=r"telemetry\.trackers\.1.*listed twice"):
        made.spec("telemetry.trackers=[wandb,wandb]")
    assert open_all(made.spec("telemetry.trackers=[]"), made.RUN_ID, made.DATASET_ID, store) == []
    assert [each.name for each in open_all(made.spec(), made.RUN_ID, made.DATASET_ID, store)] == ["MLflow"]
