"""The commands about runs: they find the backend, print JSON for scripts, and import nothing heavy."""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from holdfast.pipelines.backends.kubeflow.connection import KubeflowRefusedError
from holdfast.pipelines.cli import app
from holdfast.spec import parse_spec
from holdfast.spec.errors import ExitCode, MissingError, StoreUnreachableError
from holdfast.store import layout, open_store
from holdfast.telemetry import emit
from holdfast.telemetry.event_log import recording
from holdfast.telemetry.events import Progress
from tests import warm
from tests.kubeflow_server import KubeflowServer
from tests.pipelines.backends.kubeflow.conftest import compile_once, without_pauses
from tests.pipelines.cli.test_cli import imports_of

__all__ = ["compile_once", "without_pauses"]  # fixtures
ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "examples/quickstart.yaml")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("KFP_ENDPOINT", "HOLDFAST_BACKEND", "HOLDFAST_STORE", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def spec(tmp_path: Path, s3_url: str) -> Path:
    """A spec whose text is in a bucket, so that its run id is known here. Its store is on a volume of the pods."""
    open_store(s3_url).put("text.txt", b"one text, with enough words to be a document\n" * 20)
    file = tmp_path / "spec.yaml"
    volume = {"claim": "corpus", "path": str(tmp_path)}
    body = {
        "name": "small",
        "store": f"file://{tmp_path}/store",
        "data": {"sources": [{"uri": f"{s3_url}/text.txt"}]},
    }
    file.write_text(json.dumps({**body, "cluster": {"volumes": [volume]}}))
    return file


def holdfast(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_is_found_and_resumed_on_its_backend(spec: Path, tmp_path: Path) -> None:
    store = ("--store", f"file://{tmp_path}/store")
    with KubeflowServer() as kubeflow:
        submission = json.loads(
            holdfast("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--json").stdout
        )
        run = submission["run_id"]
        assert json.loads(holdfast("show", run[:6], "--steps", *store, "--json").stdout)["backend"] == "kubeflow"
        assert json.loads(holdfast("runs", *store, "--json").stdout)[0]["backend"] == "kubeflow"
        assert (
            json.loads(holdfast("runs", "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--json").stdout)[0][
                "id"
            ]
            == submission["run"]["id"]
        )
        assert json.loads(holdfast("stop", run[:6], *store, "--json").stdout)["ended"] is True
        kubeflow.progress(submission["run"]["id"], "FAILED", {"preprocess": "FAILED"})
        for wanted in (run[:6], submission["run"]["id"], submission["run"]["id"][:8], "small"):
            assert (
                json.loads(holdfast("show", wanted, "--steps", *store, "--json").stdout)["id"]
                == submission["run"]["id"]
            )
            assert json.loads(holdfast("show", wanted, *store, "--json").stdout)["run_id"] == run
        output = json.loads(holdfast("resume", run[:6], *store, "--json").stdout)
        assert output["created"] is True
        assert json.loads(holdfast("show", run[:6], "--steps", *store, "--json").stdout)["id"] == output["run"]["id"]


def test_the_command_that_submit_names_finds_the_run_from_another_shell(spec: Path) -> None:
    with KubeflowServer() as kubeflow:
        output = holdfast("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint).stdout
    (command,) = (line.split() for line in output.splitlines() if line.strip().startswith("holdfast show"))
    assert command[3:] == ["--store", json.loads(spec.read_text())["store"]]


def test_a_run_with_a_named_backend_can_be_stopped_while_the_store_is_unreachable(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "away"
    away.symlink_to(away)  # every access fails
    with KubeflowServer() as kubeflow:
        run = json.loads(
            holdfast("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--json").stdout
        )["run_id"]
        monkeypatch.setenv("KFP_ENDPOINT", kubeflow.endpoint)
        command = ("stop", run, "--store", f"file://{away}")
        with pytest.raises(StoreUnreachableError):
            holdfast(*command)
        assert holdfast(*command, "--backend", "kubeflow").stdout.endswith("is stopping\n")


def test_the_dry_run_of_every_backend_prints_its_objects_and_sends_none(spec: Path, tmp_path: Path) -> None:
    for backend, text in (
        ("argo", "kind: WorkflowTemplate"),
        ("kubeflow", "method: POST"),
        ("local", "nodes"),
    ):
        result = holdfast("run", spec, "--backend", backend, "--dry-run")
        assert (result.exit_code, text in result.stdout) == (0, True)
    assert not (tmp_path / "store").exists()


def test_replan_reaches_the_parameters_of_the_dag(spec: Path) -> None:
    output = holdfast("run", spec, "--backend", "argo", "--dry-run", "--replan").stdout
    assert "name: replan\n      value: 'true'" in output


def test_resume_does_not_repeat_an_earlier_replan(spec: Path, tmp_path: Path) -> None:
    with KubeflowServer() as kubeflow:
        submission = json.loads(
            holdfast("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--replan", "--json").stdout
        )
        kubeflow.runs[submission["run"]["id"]]["state"] = "FAILED"
        command = ("resume", submission["run_id"], "--store", f"file://{tmp_path}/store", "--json")
        replans = []
        for extra in ((), ("--replan",)):
            run_id = json.loads(holdfast(*command, *extra).stdout)["run"]["id"]
            replans.append(kubeflow.runs[run_id]["runtime_config"]["parameters"]["replan"])
            kubeflow.runs[run_id]["state"] = "FAILED"
    assert replans == [False, True]


def test_resume_ignores_a_submission_refused_for_its_plan(spec: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    with KubeflowServer() as kubeflow:

        def ended(made: dict[str, Any], code: int) -> None:
            kubeflow.runs[made["run"]["id"]]["state"] = "FAILED"
            summary = {"status": "failed", "exit_code": code, "ended": time.time()}
            store.put(layout.run(made["run_id"], "summary.json"), json.dumps(summary).encode())

        def resources_of(made: dict[str, Any]) -> list[int]:
            parameters = kubeflow.runs[made["run"]["id"]]["runtime_config"]["parameters"]
            checked = parse_spec(parameters["spec"], parameters["overrides"])
            return [checked.training.micro_batch, parameters["replan"]]

        submit = ("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--json")
        submission = json.loads(holdfast(*submit).stdout)
        first = resources_of(submission)
        ended(submission, 203)
        for size in (1, 2):  # two, one after the other
            refused = json.loads(holdfast(*submit, "--set", f"training.micro_batch={size}").stdout)
            assert (refused["run_id"], resources_of(refused)) == (submission["run_id"], [size, False])
            ended(refused, ExitCode.PLAN_CHANGED)
        command = ("resume", submission["run_id"], "--store", store.url, "--json")
        replanned = json.loads(holdfast(*command, "--replan").stdout)
        assert resources_of(replanned) == [2, True]
        ended(replanned, ExitCode.PLAN_CHANGED)
        for _ in range(2):
            output = json.loads(holdfast(*command).stdout)
            assert resources_of(output) == first
            ended(output, 203)


def test_a_failed_run_has_an_exit_code_and_a_running_one_has_none(spec: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    with KubeflowServer() as kubeflow:
        submission = json.loads(
            holdfast("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--json").stdout
        )
        assert submission["run"]["exit_code"] is None
        command = ("show", submission["run_id"], "--steps", "--store", store.url, "--json")
        kubeflow.runs[submission["run"]["id"]]["state"] = "FAILED"
        assert json.loads(holdfast(*command).stdout)["exit_code"] is None  # no summary says it yet
        summary = {"status": "failed", "exit_code": 12, "ended": time.time()}
        store.put(layout.run(submission["run_id"], "summary.json"), json.dumps(summary).encode())
        assert json.loads(holdfast(*command).stdout)["exit_code"] == 12
        kubeflow.runs[submission["run"]["id"]]["state"] = "SUCCEEDED"
        assert json.loads(holdfast(*command).stdout)["exit_code"] == 0


def test_the_version_is_an_option() -> None:
    assert holdfast("--version").stdout == f"holdfast {version('holdfast')}\n"


def test_commands_that_print_data_print_json(spec: Path) -> None:
    assert json.loads(holdfast("validate", spec, "--json").stdout)["name"] == "small"
    assert set(json.loads(holdfast("validate", spec, "--ids", "--json").stdout)) >= {"dataset_id", "run_id"}
    assert json.loads(holdfast("models", "list", "--json").stdout) == []
    assert json.loads(holdfast("runs", "--json").stdout) == []


@pytest.mark.slow
def test_no_command_of_the_control_plane_imports_torch() -> None:
    commands = [
        ["--version"], ["runs"], ["show", "x"], ["show", "x", "--steps"], ["logs", "x"], ["stop", "x"], ["resume", "x"],
        ["runs", "--backend", "local"], ["validate", QUICKSTART, "--ids"], ["validate", "--schema"], ["models", "list"],
        ["trigger", QUICKSTART], ["compile", QUICKSTART, "-o", "-"], ["compile", QUICKSTART, "--target", "argo"],
        ["run", QUICKSTART, "--backend", "kubeflow", "--dry-run"],
    ]  # fmt: skip
    assert imports_of(commands, {"torch"}, dict(os.environ)) == {}


def test_the_status_has_the_progress_of_the_training_on_any_backend(spec: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    with KubeflowServer() as kubeflow:
        submission = json.loads(
            holdfast("run", spec, "--backend", "kubeflow", "--endpoint", kubeflow.endpoint, "--json").stdout
        )
        kubeflow.runs[submission["run"]["id"]]["state"] = "RUNNING"
        command = ("show", submission["run_id"][:6], "--steps", "--store", store.url)
        assert json.loads(holdfast(*command, "--json").stdout)["progress"] is None
        with recording(store, submission["run_id"], "rank-0"):
            for step in (20, 30):
                emit(Progress(step=step, steps=300, loss=3.25, tokens_per_second=1234.0, seconds_left=90.0))
        progress = json.loads(holdfast(*command, "--json").stdout)["progress"]
        output = holdfast(*command).stdout
    expected = {"step": 30, "steps": 300, "loss": 3.25, "tokens_per_second": 1234.0, "seconds_left": 90.0}
    assert {name: progress[name] for name in expected} == expected
    assert "step 30/300 (10 %)  loss 3.2500" in output
    assert "1,234 tokens/s  00:01:30 left" in output


def test_upload_and_schedule_print_json_for_scripts(spec: Path) -> None:
    every = ("--set", "schedule.every_minutes=60")
    with KubeflowServer() as kubeflow:
        options = ("--endpoint", kubeflow.endpoint, "--json")
        uploaded = json.loads(holdfast("upload", spec, *options).stdout)
        assert (uploaded["pipeline"], uploaded["created"]) == ("small", True)
        assert uploaded["version_id"] in kubeflow.versions
        output = json.loads(holdfast("schedule", spec, *every, *options).stdout)
        assert output["recurring_run_id"] in kubeflow.recurring
        (entry,) = json.loads(holdfast("schedule", "--list", *options).stdout)
        assert (entry["pipeline"], entry["enabled"]) == ("small", True)
        paused = json.loads(holdfast("schedule", spec, *every, "--pause", *options).stdout)
        assert paused["paused"] == [output["recurring_run_id"]]
        assert (
            json.loads(holdfast("schedule", spec, *every, "--delete", *options).stdout)["removed"] == paused["paused"]
        )
        dry = json.loads(holdfast("upload", spec, "--dry-run", *options).stdout)
    assert dry == []  # nothing would be changed


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (("validate", "{spec}", "--set", "training.steps=none", "--json"), 10, "BAD_SPEC"),
        (("show", "nothing", "--steps", "--json"), 15, "NOT_FOUND"),
        (("runs", "--bakend", "argo", "--json"), 2, "USAGE"),
        (("run", "{spec}", "--backend", "kuberflow", "--json"), 2, "USAGE"),
        (("run", "{spec}", "--store", "s3:/bucket", "--json"), 2, "USAGE"),
        (("run", "{spec}", "--fresh", "--salt", "a", "--json"), 2, "USAGE"),
    ],
    ids=["a spec", "a run", "an option", "a backend", "a store", "two options"],
)
def test_with_json_a_failure_is_one_document_on_standard_output(
    spec: Path, arguments: tuple[str, ...], code: int, name: str
) -> None:
    command = [sys.executable, "-m", "holdfast.pipelines.cli", *(argument.format(spec=spec) for argument in arguments)]
    result = warm.run(command, os.environ)
    assert result.returncode == code, result.stderr
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["name"], error["retryable"]) == (code, name, False)
    assert error["message"]
    if name == "BAD_SPEC":
        (problem,) = error["problems"]
        assert (problem["field"], problem["value"]) == ("training.steps", "none")
        assert problem["remedy"]
        assert (error["field"], error["remedy"]) == (problem["field"], problem["remedy"])


def test_a_result_is_all_that_json_prints(spec: Path) -> None:
    command = [sys.executable, "-m", "holdfast.pipelines.cli", "validate", str(spec), "--json"]
    result = warm.run(command, os.environ)
    assert (result.returncode, json.loads(result.stdout)["name"]) == (0, "small")


def test_show_asks_the_backend_for_a_run_that_the_store_does_not_know(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingError, match="has no runs yet"):
        holdfast("show", "nope")
    with KubeflowServer() as kubeflow:
        monkeypatch.setenv("KFP_ENDPOINT", kubeflow.endpoint)
        with pytest.raises(MissingError) as failure:
            holdfast("show", "nope")
    assert "has no runs yet" not in str(failure.value)


def test_json_of_a_dry_run_is_json(spec: Path) -> None:
    assert json.loads(holdfast("run", spec, "--dry-run", "--json").stdout)[0]["nodes"]


def test_a_list_without_a_backend_takes_that_of_the_environment_or_of_the_endpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KubeflowServer() as kubeflow:
        assert json.loads(holdfast("runs", "--endpoint", kubeflow.endpoint, "--json").stdout) == []
        monkeypatch.setenv("HOLDFAST_BACKEND", "kubeflow")
        monkeypatch.setenv("KFP_ENDPOINT", kubeflow.endpoint)
        with pytest.raises(KubeflowRefusedError, match="In single-user mode, a namespace"):  # so it was queried
            holdfast("runs", "--namespace", "ann")


def test_options_that_have_no_effect_are_refused(spec: Path) -> None:
    for arguments in (
        ("compile", spec, "--concurrent-trials", "2"),
        ("compile", spec, "--over", "training.seed=1,2", "--concurrent-trials", "2"),
        ("validate", "--schema", "--ids"),
    ):
        assert holdfast(*arguments).exit_code == ExitCode.USAGE, arguments
