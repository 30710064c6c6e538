"""The wrapper of a KFP component: the exit of its process, and the files that it leaves for a local
runner of the DAG.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runtime.environment import OUTCOMES
from holdfast.spec import ExitCode, dump_spec, parse_spec, run_id
from holdfast.spec.engine_text import escape
from holdfast.steps.jobs import outcomes_of, recorder
from holdfast.steps.outcomes import STOP_FILE, Outcome, first_failure, read_outcomes, was_stopped
from holdfast.steps.runner import files_to_environment
from tests import warm

SPEC = "{name: some, data: {sources: [{uri: 'x'}]}}"


STEP = """
import os, sys, signal
from types import SimpleNamespace as Some
from holdfast.spec.errors import DataError
from holdfast.steps import Artifact, StepResult
from holdfast.steps.adapters import component

shown = ("model", "metrics", "curves")

def done(value, **artifacts):
    return StepResult({{"run_id": value}}, dict.fromkeys(shown, Artifact()) | artifacts)

def body(spec, store, dataset_id, salt, **inputs):
    {body}

given = {{"spec": {spec!r}, "overrides": ["training.steps=7"], "store": {store!r}, "job": {job!r}}}
given |= dict.fromkeys(["salt", "replan"], "") | {{"dataset_id": "d"}}
given |= {{"compiled": {{"steps": 300}}, **{given!r}}}
given |= {{name: Some(path={folder!r} + name, metadata={{}}) for name in shown}}
print("returned", component("train", body, given))
print(given["model"].metadata, given["metrics"].metadata)
"""


def component(tmp_path: Path, body: str, spec: str = SPEC, **given: object) -> subprocess.Popen[str]:
    environment = {**os.environ, OUTCOMES: str(tmp_path), "HOLDFAST_STORE": "file:///somewhere"}
    code = STEP.format(body=body, spec=spec, store="", job="", folder=f"{tmp_path}/", given=given)
    command = [sys.executable, "-c", code]
    return warm.popen(command, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout + stderr


def test_the_body_gets_the_checked_spec_and_the_default_store(tmp_path: Path) -> None:
    code, output = ended(component(tmp_path, "return done(f'{spec.training.steps} {store} {dataset_id}')"))
    assert (code, output.splitlines()[0]) == (0, "returned ('7 file:///somewhere d', 'file', 'file:///somewhere/')")
    (outcome,) = read_outcomes(tmp_path)
    assert (outcome.step, outcome.exit_code, outcome.result) == ("train", 0, "7 file:///somewhere d")


def test_arguments_of_an_engine_are_restored_and_outputs_are_escaped_again(tmp_path: Path) -> None:
    text = "{{$.pipeline_job_name}} $(HOME)"
    spec = escape(dump_spec(parse_spec(SPEC, [f"evaluation.prompts={json.dumps([text])}"])))
    code, output = ended(component(tmp_path, "return done(spec.evaluation.prompts[0] + salt)", spec, salt=escape(text)))
    assert code == 0, output
    assert output.splitlines()[0] == f"returned {(escape(text + text), 'file', 'file:///somewhere/')}"
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.result == text + text


@pytest.mark.parametrize(
    ("overrides", "given", "steps"),
    [
        ([], {"steps": 300}, 12),  # the compiled default; the spec decides, and may have changed since
        ([], {"steps": 20, "learning_rate": 1e-5}, 20),
        (["training.steps=7"], {"steps": 20}, 7),
    ],
    ids=["left alone", "changed", "changed twice"],
)
def test_a_changed_step_parameter_applies_before_the_overrides(
    tmp_path: Path, overrides: list[str], given: dict[str, object], steps: int
) -> None:
    spec = SPEC.replace("name: some", "name: some, training: {steps: 12}")
    body = "return done(f'{spec.training.steps} {spec.training.optimizer.learning_rate}')"
    code, output = ended(component(tmp_path, body, spec, overrides=overrides, **given))
    assert (code, output.splitlines()[0].partition(",")[0]) == (
        0,
        f"returned ('{steps} {given.get('learning_rate', 1e-3)}'",
    )


def test_an_artifact_points_into_the_store_and_shows_no_figure_that_is_not_finite(tmp_path: Path) -> None:
    artifacts = (
        "model=Artifact(key='runs/r', metadata={'run_id': 'r'}), metrics=Artifact(metadata={'a': 1, 'b': 1e999})"
    )
    code, output = ended(component(tmp_path, f"return done('r', {artifacts})"))
    pointer = {"store": "file:///somewhere", "key": "runs/r", "run_id": "r"}
    assert (code, output.splitlines()[1]) == (0, f"{pointer} {{'a': 1}}")
    assert json.loads((tmp_path / "model").read_text()) == pointer


@pytest.mark.parametrize("key", ["runs/r/export/step-7/", "runs/r/export/step-7/config.json"])
def test_an_artifact_output_has_the_scheme_and_the_full_address(tmp_path: Path, key: str) -> None:
    body = f"return done('r', model=Artifact(key={key!r}))"
    code, output = ended(component(tmp_path, body, store="s3://bucket/prefix/"))
    assert (code, output.splitlines()[0]) == (0, "returned ('r', 's3', 's3://bucket/prefix/runs/r/export/step-7')")


@pytest.mark.parametrize(
    ("body", "spec", "code", "reason"),
    [
        ("raise DataError('a.txt: is broken; fix it')", SPEC, 11, "a.txt: is broken; fix it"),
        ("return 1 / 0", SPEC, 1, "ZeroDivisionError: division by zero"),
        ("return done(1)", "{name: some}", 10, "spec: 1 problem"),
    ],
    ids=["known", "a bug", "a bad spec"],
)
def test_a_failure_ends_with_the_code_of_the_table_and_leaves_its_reason(
    tmp_path: Path, body: str, spec: str, code: int, reason: str
) -> None:
    assert ended(component(tmp_path, body, spec))[0] == code
    (outcome,) = read_outcomes(tmp_path)
    assert outcome.exit_code == code
    assert outcome.reason.startswith(reason)


def test_a_step_does_not_begin_after_a_stop(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    code, output = ended(component(tmp_path, "return done(1)"))
    assert code == 143
    assert "returned" not in output


def test_sigterm_ends_a_step_and_its_cleaning_up_runs(tmp_path: Path) -> None:
    body = "\n    ".join(["try:", "    print('ready'); signal.pause()", "finally:", "    print('cleaned', flush=True)"])
    process = component(tmp_path, body)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143
    assert "cleaned" in output


def test_a_step_that_left_no_end_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OUTCOMES, str(tmp_path))
    Outcome("preprocess", 1, 1.0, 2.0, 0).write(tmp_path)
    assert first_failure(read_outcomes(tmp_path)) is None
    Outcome("train", 1, 2.0).write(tmp_path)
    failure = first_failure(read_outcomes(tmp_path))
    assert failure is not None
    assert (failure.step, failure.exit_code) == ("train", 137)
    assert "killed" in failure.reason
    assert not was_stopped()


LATE = """
import shutil, sys
from pathlib import Path
from holdfast.steps.runner import run_step

def body(begun):
    shutil.rmtree(sys.argv[1])
    begun("file:///somewhere")
    print("worked", flush=True)

sys.exit(run_step("train", body)[1])
"""


def test_a_step_whose_folder_is_deleted_ends_as_terminated(tmp_path: Path) -> None:
    """The pipeline's runner has exited without knowing that this step was about to begin."""
    code, output = ended(component(tmp_path / "gone", "return done(1)"))
    assert (code, "returned" in output, "Traceback" in output) == (143, False, False), output
    (late := tmp_path / "late").mkdir()
    command, environment = [sys.executable, "-c", LATE, str(late)], {**os.environ, OUTCOMES: str(late)}
    process = warm.run(command, environment)
    assert (process.returncode, process.stdout) == (143, ""), process.stderr


JOB = "0b7f1a3c-1111-4222-8333-944445555666"


def on_a_cluster(tmp_path: Path, body: str, job: str = JOB) -> int:
    """The exit code of a step with a store but without a folder for its outcome."""
    code = STEP.format(body=body, spec=SPEC, store=f"file://{tmp_path}", job=job, folder=f"{tmp_path}/", given={})
    environment = {**os.environ, "HOLDFAST_POD_NAME": "quickstart-x-train-7"}
    environment.pop(OUTCOMES, None)
    return warm.run([sys.executable, "-c", code], environment).returncode


def test_on_a_cluster_the_outcome_of_a_step_is_in_the_store(tmp_path: Path) -> None:
    assert on_a_cluster(tmp_path, "raise DataError('a.txt: is broken; fix it')") == 11
    (outcome,) = outcomes_of(JOB, SPEC, store=f"file://{tmp_path}")
    assert (outcome.step, outcome.exit_code, outcome.pod) == ("train", 11, "quickstart-x-train-7")
    assert outcome.reason == "a.txt: is broken; fix it"
    assert on_a_cluster(tmp_path, "return done('abc')") == 0  # the next try
    (outcome,) = outcomes_of(JOB, SPEC, store=f"file://{tmp_path}")
    assert (outcome.exit_code, outcome.reason, outcome.result) == (0, "", "abc")


def test_on_a_cluster_a_killed_step_leaves_its_beginning(tmp_path: Path) -> None:
    assert on_a_cluster(tmp_path, "import os; os.kill(os.getpid(), 9)") == -9
    failure = first_failure(outcomes_of(JOB, SPEC, store=f"file://{tmp_path}"))
    assert failure is not None
    assert (failure.step, failure.exit_code) == ("train", 137)


@pytest.mark.parametrize("job", ["", "{{$.pipeline_job_uuid}}", "../elsewhere", "a/b"])
def test_without_the_id_of_a_job_nothing_is_kept(tmp_path: Path, job: str) -> None:
    assert recorder(job) is None
    assert on_a_cluster(tmp_path, "return done(1)", job) == 0
    assert list(tmp_path.iterdir()) == []
    assert outcomes_of(job, SPEC, store=f"file://{tmp_path}") == []


def test_a_store_that_is_no_store_does_not_fail_the_summary() -> None:
    assert outcomes_of(JOB, SPEC, store="ftp://nowhere") == []


def test_mounted_secrets_become_variables_unless_they_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TEST_A", "HF_TEST_B"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)  # so that the test removes it afterwards
    monkeypatch.setenv("HF_TEST_C", "set before")
    bucket = tmp_path / "bucket"
    hidden = bucket / "..2026_11_20"  # how the kubelet swaps the files of a Secret atomically
    hidden.mkdir(parents=True)
    for name, value in {"HF_TEST_A": "one", "HF_TEST_B": "two\n", "HF_TEST_C": "three", "no-name": "four"}.items():
        (hidden / name).write_text(value)
        (bucket / name).symlink_to(hidden / name)
    files_to_environment(tmp_path)
    assert (os.environ["HF_TEST_A"], os.environ["HF_TEST_B"]) == ("one", "two\n")
    assert os.environ["HF_TEST_C"] == "set before"
    assert "no-name" not in os.environ


def test_a_mounted_secret_overrides_a_setting_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TEST_A", "before")
    monkeypatch.delenv("HF_TEST_A")
    for root, name in (("1-settings", "z-last"), ("2-secrets", "a-first")):
        (tmp_path / root / name).mkdir(parents=True)
        (tmp_path / root / name / "HF_TEST_A").write_text(root)
    files_to_environment(tmp_path / "1-settings", tmp_path / "2-secrets", tmp_path / "not mounted")
    assert os.environ["HF_TEST_A"] == "2-secrets"


IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": "/tmp", "HOLDFAST_HOME": ""}
VOLUME = "{name: a, data: {sources: [{uri: x}]}, cluster: {volumes: [{claim: shared, path: /shared}]}}"


@pytest.mark.parametrize(
    ("spec", "given", "named"),
    [
        (SPEC, {}, ("HOLDFAST_STORE=s3://", "file:///tmp/.holdfast/store", "holdfast-settings")),
        (SPEC, {"HOLDFAST_STORE": "file:///shared/store"}, ("store", "file:///shared/store")),
        (VOLUME, {"HOLDFAST_STORE": "file:///shared2/store"}, ("cluster.volumes",)),
        (VOLUME, {"HOLDFAST_STORE": "file:///shared/store"}, ("MLFLOW_TRACKING_URI", "sqlite:////tmp/.holdfast")),
        (SPEC, {"HOLDFAST_STORE": "s3://b"}, ("MLFLOW_TRACKING_URI=http", "sqlite:////tmp/.holdfast/mlflow.db")),
        (SPEC, {"HOLDFAST_STORE": "s3://b", "MLFLOW_TRACKING_URI": "/somewhere"}, ("/somewhere", "holdfast-settings")),
        (SPEC, {"HOLDFAST_STORE": "s3://b", "MLFLOW_TRACKING_URI": "sqlite:////data/m.db"}, ("/data/m.db",)),
    ],
)
def test_in_a_pod_nothing_begins_whose_results_would_go_with_the_pod(
    tmp_path: Path, spec: str, given: dict[str, str], named: tuple[str, ...]
) -> None:
    process = _in_a_pod(tmp_path, spec, given)
    assert process.returncode == ExitCode.BAD_SPEC, process.stderr
    assert all(word in process.stderr for word in named), process.stderr
    assert "remedy:" in process.stderr
    assert "worked" not in process.stdout


def test_in_a_pod_a_step_begins_with_a_server_and_a_store_that_others_see(tmp_path: Path) -> None:
    for spec, store in ((SPEC, "s3://b"), (VOLUME, "file:///shared/store")):
        process = _in_a_pod(tmp_path, spec, {"HOLDFAST_STORE": store, "MLFLOW_TRACKING_URI": "http://mlflow:5000"})
        assert (process.returncode, "worked" in process.stdout) == (0, True), process.stderr


def test_a_whole_run_in_one_pod_keeps_its_things_there(tmp_path: Path) -> None:
    process = _in_a_pod(tmp_path, SPEC, {OUTCOMES: str(tmp_path)})  # for example in a notebook
    assert (process.returncode, "worked" in process.stdout) == (0, True), process.stderr


def _in_a_pod(tmp_path: Path, spec: str, given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (tmp_path / "spec.yaml").write_text(spec)
    code = (
        "from holdfast.steps.adapters import main\n"
        "from holdfast.steps.table import StepResult\n"
        "def body(spec, url, **inputs):\n"
        "    print('worked')\n"
        "    return StepResult({'dataset_id': 'abc'})\n"
        f"raise SystemExit(main('preprocess', body, ['--spec', {str(tmp_path / 'spec.yaml')!r}]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST", "MLFLOW"))}
    return warm.run([sys.executable, "-c", code], {**environment, **IN_A_POD, **given})


def test_on_a_cluster_the_summary_names_the_run_the_failed_step_and_its_own_words(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    record = recorder(JOB)
    assert record is not None
    record(url, Outcome("preprocess", 7, 1.0, 2.0, 0, result="0123456789abcdef"))
    record(url, Outcome("train", 7, 3.0, 4.0, 12, reason="loss is NaN at step 7; lower the learning rate"))
    code = (
        "from types import SimpleNamespace as Some\n"
        "from holdfast.pipelines.backends.kubeflow.component_files import component_of\n"
        f"component_of('notify').python_func(spec={SPEC!r}, store={url!r}, job={JOB!r}, "
        "status=Some(state='FAILED', error_message='a pod failed'), summary=Some(path='summary.md', metadata={}))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    notified = warm.run([sys.executable, "-c", code], environment, tmp_path)
    assert notified.returncode == 0, notified.stderr
    summary = (tmp_path / "summary.md").read_text()
    expected = run_id(parse_spec(SPEC), "0123456789abcdef")
    assert f"(run {expected}): failed" in summary
    assert "failed step: train" in summary
    assert "loss is NaN at step 7; lower the learning rate" in summary
    assert f"holdfast logs {JOB}" in summary


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("raise DataError('a.txt: is broken')", 0, "returned ('', '', '')\n"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, ""),  # the whole execution is ended
    ],
    ids=["alone", "with all others"],
)
def test_a_trial_that_fails_alone_leaves_its_cause_and_ends_nothing(
    tmp_path: Path, body: str, code: int, message: str
) -> None:
    ended_with, output = ended(component(tmp_path, body, trial="2"))
    assert (ended_with, message in output) == (code, True)
    (outcome,) = read_outcomes(tmp_path)
    assert (tmp_path / "train-2.json").exists()
    assert (outcome.name, outcome.part, outcome.exit_code) == ("train-2", "2", code or 11)


def test_steps_after_a_failed_trial_are_skipped(tmp_path: Path) -> None:
    code, output = ended(component(tmp_path, "return done('r')", trial="2", dataset_id=""))
    assert (code, "train is left out" in output) == (0, True)
    assert read_outcomes(tmp_path) == []
