"""A sweep on this machine: one dataset, one comparison, one registered model. It resumes, and repeated it returns
its result."""

import json
import signal
import time
from pathlib import Path

import pytest

from holdfast.tracking import connect
from tests.whole.small import held, holdfast, objects, only, start, write_corpus, write_spec

OVER = ("--over", "training.optimizer.learning_rate=1e-3,1e-2")


@pytest.mark.drill
def test_a_stopped_sweep_resumes_registers_the_best_trial_and_then_changes_nothing(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path)

    def saved() -> set[str]:
        return {path.parts[-3] for path in objects(tmp_path, "runs/*/checkpoints/*.json")}

    second_waits = held(tmp_path, 5, after="runs/*/result.json")
    with start(tmp_path, "spec.yaml", *OVER, command="sweep", **second_waits) as process:
        while process.poll() is None and len(saved()) < 2:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode != 0
    assert objects(tmp_path, "sweeps/*/comparison.json") == []
    (trained,) = objects(tmp_path, "runs/*/result.json")
    stamp = trained.stat().st_mtime_ns

    first_result = holdfast(tmp_path, "spec.yaml", *OVER, command="sweep")
    assert first_result.returncode == 0, first_result.stdout + first_result.stderr
    assert trained.stat().st_mtime_ns == stamp  # it was not trained again
    rows = only(tmp_path, "sweeps/*/comparison.json")["rows"]
    assert len(objects(tmp_path, "datasets/*/dataset.json")) == 1
    rates = {f"training.optimizer.learning_rate={rate}" for rate in ("1e-3", "1e-2")}
    assert {change for row in rows for change in row["changes"]} == rates
    assert rows[0]["loss"] < rows[1]["loss"]
    for row in rows:
        verdict = only(tmp_path, f"runs/{row['run_id']}/evaluations/*.json")
        assert (verdict["metrics"]["loss"], verdict["state_digest"]) == (row["loss"], row["state_digest"])
    assert only(tmp_path, "runs/*/registrations/*.json")["run_id"] == rows[0]["run_id"]

    before = sorted((path, path.stat().st_mtime_ns) for path in objects(tmp_path, "**/*"))
    result = holdfast(tmp_path, "spec.yaml", *OVER, command="sweep")
    assert result.returncode == 0, result.stdout + result.stderr
    assert rows[0]["run_id"] in result.stdout
    assert sorted((path, path.stat().st_mtime_ns) for path in objects(tmp_path, "**/*")) == before


@pytest.mark.drill
def test_a_failed_trial_is_listed_and_the_rest_is_compared(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    write_spec(tmp_path)
    options = ("--over", "model.context=32,4096")  # more than the held-out text has
    sweep_result = holdfast(tmp_path, "spec.yaml", *options, command="sweep")
    assert sweep_result.returncode == 5, sweep_result.stdout + sweep_result.stderr
    assert "failed: model.context=4096: train failed (exit code 11)" in sweep_result.stdout
    comparison = only(tmp_path, "sweeps/*/comparison.json")
    assert [row["changes"] for row in comparison["rows"]] == [["model.context=32"]]
    assert [(trial["changes"], trial["exit_code"]) for trial in comparison["failed"]] == [(["model.context=4096"], 11)]
    assert only(tmp_path, "runs/*/registrations/*.json")["run_id"] == comparison["rows"][0]["run_id"]
    assert only(tmp_path, "sweeps/*/summary.json")["failed_step"] == "train-2"

    client = connect(f"sqlite:///{tmp_path}/home/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    by_name = {run.info.run_name: run for run in runs}
    child = by_name[f"small-{comparison['rows'][0]['run_id'][:8]}"]
    assert child.data.tags["mlflow.parentRunId"] == by_name["small-sweep"].info.run_id

    status = holdfast(tmp_path, "small-sweep", "--steps", "--json", command="show")
    assert json.loads(status.stdout)["state"] == "FAILED"
    shown = holdfast(tmp_path, "small-sweep", "--json", command="show")
    assert json.loads(shown.stdout) == comparison
    assert "sweep" not in holdfast(tmp_path, command="runs").stdout  # its trials are runs, and the sweep is not
    result = holdfast(tmp_path, "small-sweep", "--json", command="resume")  # failed trials are retried
    assert result.returncode == 5, result.stdout + result.stderr
    assert json.loads(result.stdout)["run_id"] == comparison["sweep_id"]
    assert len(objects(tmp_path, "runs/*/attempts/*.json")) == 1
