"""Answers of `holdfast run` from the store alone."""

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.launch.interface import UNSAVED
from holdfast.pipelines.backends.local import run, trial_series
from holdfast.pipelines.backends.local.run import LocalRun, finished
from holdfast.pipelines.backends.request import RunRequest
from holdfast.scoring import settings_key
from holdfast.spec import ExitCode, parse_spec
from holdfast.steps import STEPS
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store
from holdfast.tracking import registration_key
from tests.exports import write_export

RUN_ID = "fedcba9876543210"


def registered_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> tuple[LocalRun, Path]:
    """A run that is registered according to the store, and the database of its MLflow, which does not exist yet."""
    database = tmp_path / "mlflow.db"
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given.format(database))
    spec = parse_spec("name: story\ndata:\n  sources:\n    - uri: corpus/*.txt\n")
    local_run = LocalRun(spec, (tmp_path / "store").as_uri(), "0123456789abcdef", RUN_ID, "")
    (tmp_path / "config.json").write_text("{}")
    export, digest = write_export(local_run.store, RUN_ID, 3, "state", tmp_path, ["config.json"])
    registration = {"model": "story", "version": 1, "alias": "champion"}
    for key, value in (
        (layout.result(RUN_ID), {"step": 3, "export": export, "export_digest": digest}),
        (layout.verdict(RUN_ID, f"{settings_key(spec)}-none"), {"word": "blessed"}),
        (layout.registration(RUN_ID, registration_key(spec.registered_model)), registration),
    ):
        local_run.store.put(key, json.dumps(value).encode())
    return local_run, database


@pytest.mark.parametrize("given", ["", "sqlite:///{}", "sqlite:///{}?timeout=5"])
def test_a_registration_counts_only_while_its_mlflow_exists(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_run, database = registered_run(tmp_path, monkeypatch, given)
    assert finished(local_run) is None
    database.touch()
    record = finished(local_run)
    assert record is not None
    assert record.model_version == "story/1"
    database.unlink()
    local_run.store.put(layout.verdict(RUN_ID, f"{settings_key(local_run.spec)}-none"), b'{"word": "not_blessed"}')
    assert finished(local_run) is not None


@pytest.mark.parametrize("step", [name for name in STEPS if name not in ("trigger", "compare", "divide", "tokenise")])
@pytest.mark.parametrize("code", [1, ExitCode.STORE_UNREACHABLE, None])
def test_a_finished_run_whose_summary_could_not_be_sent_has_succeeded_and_one_that_failed_elsewhere_has_not(
    step: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_run, database = registered_run(tmp_path, monkeypatch, "")
    database.touch()
    monkeypatch.setattr(run, "print_summary", lambda *_: None)  # which reads a history
    (log := tmp_path / "run.log").write_text("")
    names = ["preprocess", "train", "evaluate", "register", "notify"]
    ends = [Outcome(name, 1, 0.0, 1.0, code if name == step else 0, "reason") for name in names]
    ended = run._conclude(local_run, Console(file=io.StringIO()), ends, log, [], False, "holdfast run")
    assert (ended == ExitCode.OK) is (step == "notify")


@pytest.mark.parametrize(
    ("code", "ends", "words"),
    [(204, ExitCode.PREEMPTED, "train saved a checkpoint and left"), (None, ExitCode.KILLED, "")],
)
def test_a_killed_process_of_the_pipeline_is_reported_with_what_its_step_did(
    code: int | None, ends: ExitCode, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_run, _ = registered_run(tmp_path, monkeypatch, "")
    (log := tmp_path / "run.log").write_text("")
    output = io.StringIO()
    outcomes = [Outcome("preprocess", 1, 0.0, 1.0, 0), Outcome("train", 1, 0.0, 1.0, code)]
    assert run._conclude(local_run, Console(file=output, width=300), outcomes, log, [], True, "holdfast run") == ends
    assert run.WORKER_KILLED in output.getvalue() and words in output.getvalue()


@pytest.mark.parametrize(
    ("code", "reason", "ends", "words"),
    [
        (204, "stopped", ExitCode.PREEMPTED, "stopped: a checkpoint is saved. "),
        (143, "stopped", ExitCode.INTERRUPTED, "stopped: what was finished is kept. "),
        (
            143, f"run r: stopped (killed). The log is x; {UNSAVED} = 25; run it again", ExitCode.INTERRUPTED,
            f"stopped: {UNSAVED} = 25; earlier checkpoints are kept. ",
        ),
    ],
)  # fmt: skip
def test_what_a_stop_saved_is_printed(
    code: int, reason: str, ends: ExitCode, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_run, _ = registered_run(tmp_path, monkeypatch, "")
    output = io.StringIO()
    outcomes = [Outcome("preprocess", 1, 0.0, 1.0, 0), Outcome("train", 1, 0.0, 1.0, code, reason)]
    log, console = tmp_path / "run.log", Console(file=output, width=300)
    assert run._conclude(local_run, console, outcomes, log, [signal.SIGINT], False, "holdfast run") == ends
    assert words in output.getvalue()


@pytest.mark.parametrize("step", ["preprocess", "compare", "register", "notify"])
def test_a_sweep_that_was_compared_has_succeeded_though_its_summary_could_not_be_sent(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_series, "read_comparison", lambda *_: "compared")
    monkeypatch.setattr(trial_series, "print_comparison", lambda *_: None)
    monkeypatch.setattr(trial_series, "_code_of", lambda _: ExitCode.OK)
    (log := tmp_path / "run.log").write_text("")
    names = ["preprocess", "compare", "register", "notify"]
    ends = [Outcome(name, 1, 0.0, 1.0, 1 if name == step else 0, "reason") for name in names]
    request = RunRequest(parse_spec("{name: a, data: {sources: [{uri: x}]}}"), tmp_path.as_uri(), run_id=RUN_ID)
    code = trial_series._conclude(request, open_store(request.store), ends, 0, log, Console(file=io.StringIO()))
    assert (code == ExitCode.OK) is (step == "notify")
