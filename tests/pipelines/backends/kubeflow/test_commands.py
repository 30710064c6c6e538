"""The commands as a user types them: their output, and the exit code that a script reads."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from holdfast.pipelines.cli import app
from holdfast.spec import load_spec, run_id
from holdfast.steps.outcomes import Outcome
from holdfast.store import layout, open_store
from tests import warm
from tests.kubeflow_server import KubeflowServer

ROOT = Path(__file__).parents[4]
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec whose text is on a volume of the pods and of this machine."""
    (tmp_path / "text.txt").write_text("one text, with enough words to be a document\n" * 20)
    file = tmp_path / "spec.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "small",
                "store": "s3://bucket/prefix",
                "data": {"sources": [{"uri": str(tmp_path / "text.txt")}]},
                "cluster": {"volumes": [{"claim": "corpus", "path": str(tmp_path)}]},
                "schedule": {"cron": "0 3 * * 1"},
            }
        )
    )
    return file


@pytest.fixture
def there(kubeflow: KubeflowServer, monkeypatch: pytest.MonkeyPatch) -> KubeflowServer:
    """A KFP server that the environment names."""
    monkeypatch.setenv("KFP_ENDPOINT", kubeflow.endpoint)
    return kubeflow


def holdfast(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
def test_from_upload_to_cancel(there: KubeflowServer, spec: Path) -> None:
    assert re.fullmatch(
        r"small \d{4}-\d\d-\d\d-(\w{7,8}-(dirty-)?)?[0-9a-f]{16}: uploaded\n  http://\S+/#/pipelines/details/\S+\n",
        holdfast("upload", spec).output,
    )
    assert ": exists already" in holdfast("upload", spec).output
    submitted = holdfast("run", spec, "--backend", "kubeflow").stdout
    # No run id: the content of the pods' volume is not known here.
    assert re.match(rf"small [0-9a-f]{{8}}: submitted\n  {there.endpoint}/#/runs/details/{UUID}\n", submitted)
    assert "exists already, PENDING" in holdfast("run", spec, "--backend", "kubeflow").output
    (kfp_run_id,) = there.runs
    run_id = re.findall(r"holdfast show (\S+)", submitted)[0]
    there.progress(kfp_run_id, "RUNNING", {"preprocess": "SUCCEEDED", "train": "SUCCEEDED"})
    there.logs = {(kfp_run_id, "preprocess"): b"done\n", (kfp_run_id, "train"): b"step 1\n"}
    output = holdfast("show", run_id, "--steps").output
    assert output.startswith("small ")
    assert re.search(r"preprocess +SUCCEEDED +7\.0 s", output)
    assert re.search(r"train +SUCCEEDED", output)
    assert holdfast("logs", run_id).output == "[preprocess] done\n[train] step 1\n"
    assert holdfast("logs", run_id, "--step", "train").output == "step 1\n"
    assert "is stopping" in holdfast("stop", run_id).output
    there.progress(kfp_run_id, "FAILED", {"preprocess": "SUCCEEDED", "train": "SUCCEEDED"})
    assert "has ended already, CANCELED" in holdfast("stop", run_id).output


def test_status_and_show_know_a_run_by_what_was_printed_and_give_its_id_once_preprocess_has_it(
    there: KubeflowServer, spec: Path, tmp_path: Path
) -> None:
    """A real KFP failed here: `submit` printed an invalid id, and `show` found nothing by it."""
    at = ("--store", f"file://{tmp_path}/store")
    output = holdfast("run", spec, "--backend", "kubeflow", *at).output
    (kfp_run_id,) = there.runs
    assert kfp_run_id in output
    assert not re.search(r"\b[0-9a-f]{16}\b", output)
    there.progress(kfp_run_id, "RUNNING", {"preprocess": "RUNNING"})
    assert "\n  run " not in holdfast("show", kfp_run_id, "--steps", *at).output
    for printed in (kfp_run_id, kfp_run_id[:8], "small"):
        assert holdfast("show", printed, *at).exit_code == 0
    store, dataset = open_store(f"file://{tmp_path}/store"), "d" * 16
    store.put(layout.job(kfp_run_id, "preprocess"), Outcome("preprocess", 1, 1.0, result=dataset).as_json())
    identity = run_id(load_spec(spec), dataset)
    assert f"\n  run {identity}\n" in holdfast("show", kfp_run_id, "--steps", *at).output
    for printed in (kfp_run_id, identity, "small"):
        assert holdfast("show", printed, *at).exit_code == 0


def test_fresh_makes_another_run_and_its_salt_names_it_again(there: KubeflowServer, spec: Path) -> None:
    holdfast("run", spec, "--backend", "kubeflow")
    fresh = holdfast("run", spec, "--backend", "kubeflow", "--fresh").output
    salt = re.search(r"--salt (\S+)", fresh)
    assert salt
    assert len(there.runs) == 2
    assert "exists already" in holdfast("run", spec, "--backend", "kubeflow", "--salt", salt[1]).output
    assert holdfast("run", spec, "--backend", "kubeflow", "--salt", "a", "--fresh").exit_code == 2


def test_a_schedule_is_made_listed_paused_changed_and_deleted(there: KubeflowServer, spec: Path) -> None:
    assert holdfast("schedule", spec).output.startswith("small: cron 0 0 3 * * 1\n")
    assert "(exists already)" in holdfast("schedule", spec).output
    assert re.match(r"small +enabled +cron 0 0 3 \* \* 1\n", holdfast("schedule", "--list").output)
    assert holdfast("schedule", spec, "--pause").output == "small: paused\n"
    assert re.match(r"small +paused ", holdfast("schedule", "--list").output)
    changed = holdfast("schedule", spec, "--set", "schedule.cron=0 4 * * 1").output
    assert "removed 1 former schedule" in changed
    assert holdfast("schedule", spec, "--delete").output == "small: deleted\n"
    assert holdfast("schedule", "--list").output.startswith("no schedules on ")
    for arguments in ((), (spec, "--list"), (spec, "--pause", "--delete")):
        assert holdfast("schedule", *arguments).exit_code == 2


@pytest.mark.parametrize("command", ["upload", "run", "schedule"])
def test_a_dry_run_needs_no_server_and_prints_yaml(spec: Path, command: str) -> None:
    result = holdfast(command, spec, *(("--backend", "kubeflow") if command == "run" else ()), "--dry-run")
    assert result.exit_code == 0
    documents = list(yaml.safe_load_all(result.stdout))
    assert [document["method"] for document in documents] == ["POST"] * len(documents)
    assert documents[0]["path"] == "/apis/v2beta1/pipelines"


def test_a_dry_run_with_a_server_lists_the_changes_and_makes_none(there: KubeflowServer, spec: Path) -> None:
    holdfast("run", spec, "--backend", "kubeflow")
    holdfast("schedule", spec)
    changes = list(there.changes)
    assert holdfast("run", spec, "--backend", "kubeflow", "--dry-run").stdout == "# nothing would be changed\n"
    paths = [
        document["path"] for document in yaml.safe_load_all(holdfast("schedule", spec, "--delete", "--dry-run").stdout)
    ]
    assert [path.rpartition(":")[2] for path in paths[:1]] == ["disable"]
    assert there.changes == changes


def test_a_step_that_is_none_is_a_usage_error(there: KubeflowServer) -> None:
    assert holdfast("logs", "abc", "--step", "trian").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment", "code", "message"),
    [
        (["show", "--steps", "abc"], {}, 15, "KFP_ENDPOINT"),
        (["show", "--steps", "abc", "--endpoint", "http://127.0.0.1:9"], {}, 203, "does not answer"),
        (
            ["show", "--steps", "abc"],
            {"KFP_ENDPOINT": "http://127.0.0.1:9", "KFP_TOKEN_FILE": "/nowhere"},
            15,
            "KFP_TOKEN_FILE",
        ),
    ],
)
def test_a_command_failure_has_an_exit_code_and_no_traceback(
    tmp_path: Path, arguments: list[str], environment: dict[str, str], code: int, message: str
) -> None:
    result = warm.run(
        [sys.executable, "-c", "from holdfast.pipelines.backends.kubeflow import connection; connection.PAUSE = 0\n"
         "from holdfast.pipelines.cli import main; main()", *arguments],
        {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("target", ["pytorchjob", "trainjob", "volcano"])
def test_the_training_job_alone_is_printed_for_its_system(spec: Path, target: str) -> None:
    scheduler = ["--set", "cluster.scheduler=volcano"] if target == "volcano" else []
    result = holdfast("compile", spec, "--target", target, *scheduler)
    assert result.exit_code == 0
    assert all(document["kind"] for document in yaml.safe_load_all(result.stdout))
    assert holdfast("compile", spec, "--target", target, "--image", "x").exit_code == 2


def test_compiled_for_slurm_a_spec_is_what_submit_sends(spec: Path) -> None:
    compiled = holdfast("compile", spec, "--target", "slurm")
    assert (compiled.exit_code, compiled.stdout.count("script: |")) == (0, 5)
    assert compiled.stdout == holdfast("run", spec, "--backend", "slurm", "--dry-run").stdout


def test_the_pipeline_can_be_printed_too(spec: Path) -> None:
    pipeline, platform = yaml.safe_load_all(holdfast("compile", spec, "-o", "-").stdout)
    assert pipeline["pipelineInfo"]["name"] == "small"
    assert "kubernetes" in platform["platforms"]


def test_a_version_to_promote_is_written_with_its_model() -> None:
    for wrong in ("small", "small/", "small/three", "/3"):
        assert holdfast("models", "promote", wrong).exit_code == 2
