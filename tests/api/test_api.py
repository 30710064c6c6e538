"""The Python API on one small run: it returns what the command shows."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

import holdfast
from holdfast.api import Location, checkpoints, models, specs
from holdfast.api.submission import resolve_location
from holdfast.pipelines.backends.record import Record
from holdfast.pipelines.cli import app
from holdfast.spec import ExitCode, SpecError
from holdfast.spec.errors import MissingError, UsageError
from tests import empty_mlflow
from tests.whole import small


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate home, and the corpus and spec of a small run."""
    folder = tmp_path_factory.mktemp("api")
    small.write_corpus(folder)
    small.write_spec(folder)
    empty_mlflow.place(folder / "home")
    with mock.patch.dict(os.environ, small.environment(folder / "home"), clear=True):
        before = Path.cwd()
        os.chdir(folder)
        yield folder
        os.chdir(before)


@pytest.fixture(scope="module")
def trained(home: Path) -> holdfast.Run:
    """The run, created by the call that a user makes."""
    return holdfast.run("spec.yaml", overrides={"training.steps": 6})


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = "[name for name in ('torch', 'kfp', 'mlflow', 'boto3', 'rich', 'pydantic') if name in sys.modules]"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, holdfast; print({heavy})"], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_an_unknown_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        holdfast.runn  # noqa: B018
    assert set(holdfast.__all__) <= set(dir(holdfast))
    assert all(hasattr(holdfast, name) for name in holdfast.__all__)


def test_a_run_answers_what_the_command_shows(trained: holdfast.Run) -> None:
    assert trained.name == "small"
    assert trained.status().state == "SUCCEEDED"
    assert [row["step"] for row in trained.history()] == [1, 2, 3, 4, 5, 6]
    result, verdict = trained.result(), trained.verdict()
    assert result is not None
    assert verdict is not None
    last = trained.checkpoints()[-1]
    assert (last.step, last.state_digest) == (6, result.state_digest)
    assert last.key == result.checkpoint
    assert "<html" in trained.report().html
    assert "srcdoc=" in trained.report()._repr_html_()
    assert any("train" in line for line in trained.logs())


def test_logs_of_an_ended_rank_are_readable_in_python_and_on_the_command_line(
    trained: holdfast.Run,
) -> None:
    lines = list(trained.logs(rank=0, attempt=1))
    assert any("attempt 1: starting from step 0" in line for line in lines)
    assert list(trained.logs(rank=0, follow=True)) == lines  # it has ended: nothing is waited for
    assert CliRunner().invoke(app, ["logs", trained.id, "--rank", "0", "--attempt", "1"]).stdout.splitlines() == lines
    with pytest.raises(MissingError, match="nothing that rank 7 printed is kept; there is something of rank"):
        list(trained.logs(rank=7))
    result = CliRunner().invoke(app, ["logs", trained.id, "--rank", "0", "--step", "evaluate"])
    assert result.exit_code == 2


def test_events_of_a_run_are_readable(trained: holdfast.Run) -> None:
    assert trained.events()


def test_generation_with_the_same_seed_is_reproducible(trained: holdfast.Run) -> None:
    first, two = (trained.generate("the sea", tokens=5, seed=3) for _ in range(2))
    assert first == two


def test_a_repeated_call_returns_the_existing_run(trained: holdfast.Run) -> None:
    before = trained.checkpoints()
    second = holdfast.run(holdfast.load_spec("spec.yaml", {"training.steps": 6}))
    assert (second.id, second.checkpoints()) == (trained.id, before)
    assert [run.id for run in holdfast.runs()] == [trained.id]
    assert holdfast.Run(trained.id[:6]).id == holdfast.Run("small").id == trained.id


def test_errors_of_the_api_have_a_type_and_a_remedy(trained: holdfast.Run) -> None:
    with pytest.raises(SpecError, match=r"training\.steps"):
        holdfast.load_spec("spec.yaml", {"training.steps": 0})
    with pytest.raises(MissingError, match="nothing-of-that-name"):
        holdfast.Run("nothing-of-that-name")
    with pytest.raises(TypeError, match="load_spec"):
        holdfast.run(holdfast.load_spec("spec.yaml"), overrides={"training.steps": 7})


@pytest.mark.slow
def test_a_run_that_fails_raises_the_code_of_its_step(home: Path) -> None:
    (home / "bad.txt").write_bytes(b"not \xff\xfe text")
    with pytest.raises(holdfast.RunFailedError, match=r"bad\.txt") as failed:
        holdfast.run("spec.yaml", overrides={"name": "bad", "data.sources": [{"uri": "bad.txt"}]})
    assert failed.value.exit_code == ExitCode.BAD_DATA


def test_an_unknown_backend_is_refused(home: Path) -> None:
    with pytest.raises(UsageError, match="is not a backend; use one of local"):
        holdfast.run("spec.yaml", backend="nomad")


def test_python_can_do_what_the_commands_do(trained: holdfast.Run, tmp_path: Path) -> None:
    ledger, spent = trained.ledger(), trained.cost({"accelerator_hour": 3.0})
    assert 0 < ledger.goodput <= 1
    assert spent.prices.accelerator_hour == 3.0
    assert trained.write_tensorboard(tmp_path / "board").is_file()
    assert trained.write_page(tmp_path / "page.html").is_file()
    assert len(trained.batch(1).rows) == holdfast.Spec.model_validate(trained.record().spec).training.global_batch
    assert trained.stop().ended is False
    assert (state := holdfast.run_state(trained.id)).status.state == "SUCCEEDED"
    assert state.run_id == trained.id
    newest = f"{trained.id}@6"
    assert [checkpoint.step for checkpoint in checkpoints.list_checkpoints(trained.id)][-1] == 6
    assert next(check.damages for check in checkpoints.verify(newest)) == ()
    assert checkpoints.pin(newest, reason="kept") == checkpoints.unpin(newest) == (trained.id, 6)
    one, other = (checkpoints.open_checkpoint(newest) for _ in range(2))
    assert checkpoints.diff_checkpoints(one, other).none
    assert holdfast.diff_runs(trained, trained).none
    assert [version.version for version, _ in models.models()] in ([], [1])


def test_an_argument_that_does_not_fit_is_refused_with_what_does(home: Path) -> None:
    with pytest.raises(UsageError, match="use one of kfp, argo, pytorchjob") as error:
        specs.compile_spec(holdfast.load_spec("spec.yaml"), "nomad")
    assert (error.value.field, error.value.exit_code) == ("--target", ExitCode.USAGE)
    with pytest.raises(UsageError, match="is not MODEL/VERSION"):
        models.promote("small")


def test_a_run_that_resumes_on_another_backend_keeps_no_address_of_the_old_one() -> None:
    record = Record(
        "kubeflow", "id", "run", "name", "spec", 0.0, endpoint="http://kfp.example:8888", namespace="profile"
    )
    assert resolve_location(Location(), record) == Location(
        backend="kubeflow", endpoint="http://kfp.example:8888", namespace="profile"
    )
    moved = Location(backend="ray", endpoint="http://ray.example:8265")
    assert resolve_location(moved, record) == moved
