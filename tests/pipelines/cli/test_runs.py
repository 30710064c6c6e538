"""The commands about runs: they find the backend by themselves, print JSON for scripts, and import nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from holdfast.components.spec.errors import StoreUnreachableError
from holdfast.pipelines.cli import app
from tests.kubeflow_server import KubeflowServer

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
def spec(tmp_path: Path) -> Path:
    """A spec whose text and store lie on a volume that pods have, and this machine too."""
    (tmp_path / "text.txt").write_text("one text, with enough words to be a document\n" * 20)
    file = tmp_path / "spec.yaml"
    volume = {"claim": "corpus", "path": str(tmp_path)}
    body = {
        "name": "small",
        "store": f"file://{tmp_path}/store",
        "data": {"sources": [{"uri": f"{tmp_path}/text.txt"}]},
    }
    file.write_text(json.dumps({**body, "cluster": {"volumes": [volume]}}))
    return file


def holdfast(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_is_found_where_it_was_submitted_and_gone_on_with_there(spec: Path, tmp_path: Path) -> None:
    store = ("--store", f"file://{tmp_path}/store")
    with KubeflowServer() as kubeflow:
        made = json.loads(holdfast("submit", spec, "--endpoint", kubeflow.endpoint, "--json").stdout)
        run = made["run_id"]
        assert json.loads(holdfast("status", run[:6], *store, "--json").stdout)["backend"] == "kubeflow"
        assert json.loads(holdfast("runs", *store, "--json").stdout)[0]["backend"] == "kubeflow"
        assert (
            json.loads(holdfast("list", "--endpoint", kubeflow.endpoint, "--json").stdout)[0]["id"] == made["run"]["id"]
        )
        assert json.loads(holdfast("cancel", run[:6], *store, "--json").stdout)["ended"] is True
        kubeflow.runs[made["run"]["id"]]["state"] = "CANCELED"
        again = json.loads(holdfast("resume", run[:6], *store, "--json").stdout)
        assert again["created"] is True
        assert json.loads(holdfast("status", run[:6], *store, "--json").stdout)["id"] == again["run"]["id"]


def test_a_store_that_is_away_keeps_nobody_from_ending_a_run_whose_backend_is_named(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "away"
    away.symlink_to(away)  # every look at it fails
    with KubeflowServer() as kubeflow:
        run = json.loads(holdfast("submit", spec, "--endpoint", kubeflow.endpoint, "--json").stdout)["run_id"]
        monkeypatch.setenv("KFP_ENDPOINT", kubeflow.endpoint)
        command = ("cancel", run, "--store", f"file://{away}")
        with pytest.raises(StoreUnreachableError):
            holdfast(*command)
        assert holdfast(*command, "--backend", "kubeflow").stdout.endswith("is being ended\n")


def test_the_dry_run_of_every_backend_prints_its_objects_and_sends_none(spec: Path, tmp_path: Path) -> None:
    for backend, said in (
        ("argo", "kind: WorkflowTemplate"),
        ("kubeflow", "method: POST"),
        ("local", "deploymentSpec"),
    ):
        shown = holdfast("submit", spec, "--backend", backend, "--dry-run")
        assert (shown.exit_code, said in shown.stdout) == (0, True)
    assert not (tmp_path / "store").exists()


def test_replan_reaches_the_parameters_of_the_dag(spec: Path) -> None:
    shown = holdfast("submit", spec, "--backend", "argo", "--dry-run", "--replan").stdout
    assert "name: replan\n      value: 'true'" in shown


def test_going_on_does_not_repeat_a_replan_that_was_allowed_once(spec: Path, tmp_path: Path) -> None:
    with KubeflowServer() as kubeflow:
        made = json.loads(holdfast("submit", spec, "--endpoint", kubeflow.endpoint, "--replan", "--json").stdout)
        kubeflow.runs[made["run"]["id"]]["state"] = "FAILED"
        command = ("resume", made["run_id"], "--store", f"file://{tmp_path}/store", "--json")
        given = []
        for extra in ((), ("--replan",)):
            again = json.loads(holdfast(*command, *extra).stdout)["run"]["id"]
            given.append(kubeflow.runs[again]["runtime_config"]["parameters"]["replan"])
            kubeflow.runs[again]["state"] = "FAILED"
    assert given == [False, True]


def test_the_version_is_an_option_too() -> None:
    assert holdfast("--version").stdout == holdfast("version").stdout
    assert json.loads(holdfast("version", "--json").stdout)["holdfast"] in holdfast("--version").stdout


def test_what_prints_data_prints_json(spec: Path) -> None:
    assert json.loads(holdfast("validate", spec, "--json").stdout)["name"] == "small"
    assert set(json.loads(holdfast("id", spec, "--json").stdout)) == {"dataset_id", "run_id"}
    assert json.loads(holdfast("models", "--json").stdout) == []
    assert json.loads(holdfast("runs", "--json").stdout) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"], ["runs"], ["show", "x"], ["status", "x"], ["logs", "x"], ["cancel", "x"], ["resume", "x"],
        ["list", "--backend", "local"], ["validate", QUICKSTART], ["id", QUICKSTART], ["schema"], ["models"],
        ["trigger", QUICKSTART], ["compile", QUICKSTART, "-o", "-"], ["compile", QUICKSTART, "--target", "argo"],
        ["submit", QUICKSTART, "--dry-run"],
    ],
    ids=lambda arguments: "-".join(arguments[:1] + arguments[2:3]),
)  # fmt: skip
def test_no_command_of_the_control_plane_imports_torch(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from holdfast.pipelines.cli import main\n"
        f"sys.argv = ['holdfast', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=True
    )
    assert done.stderr.strip().splitlines()[-1] == "False"
