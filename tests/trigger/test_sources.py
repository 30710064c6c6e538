"""New data is detected where it is: in a bucket, and in DVC's records. Nothing is downloaded for that."""

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.components.trigger import run
from holdfast.corpus import identify
from holdfast.spec import Spec, parse_spec, run_id
from holdfast.store import open_store
from tests import empty_mlflow
from tests.dvc_repository import commit
from tests.registered import register_version

MakeChampion = Callable[[Spec], None]


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mlflow")
    empty_mlflow.place(folder)
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture
def make_champion(tmp_path: Path, tracking_uri: str, monkeypatch: pytest.MonkeyPatch) -> MakeChampion:
    """Make a champion from the spec's current data: a registered version with the lineage that the trigger reads."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)

    def make_champion(spec: Spec) -> None:
        from holdfast.tracking import connect

        dataset_id = identify(spec)
        store, model = open_store(f"file://{tmp_path / 'store'}"), spec.registered_model
        version = register_version(store, model, run_id(spec, dataset_id), "runs/x/export/x/", "state", dataset_id)
        connect(tracking_uri).set_registered_model_alias(model, "champion", str(version))

    return make_champion


def spec_over(name: str, source: str) -> Spec:
    return parse_spec(f"name: {name}\ndata: {{sources: [{source}]}}")


def word(spec: Spec, folder: Path) -> str:
    return run(spec, open_store(f"file://{folder / 'store'}")).word


def test_a_new_changed_or_deleted_object_makes_a_retraining_due(
    s3_url: str, make_champion: MakeChampion, tmp_path: Path
) -> None:
    bucket = open_store(s3_url)
    bucket.put("text/0.txt", b"the sea is wide")
    spec = spec_over("bucket", f"{{uri: '{s3_url}/text'}}")
    make_champion(spec)
    assert word(spec, tmp_path) == "not_due"
    bucket.put("elsewhere/1.txt", b"not a source")
    bucket.put("text/0.txt", b"the sea is wide")  # the same bytes again
    assert word(spec, tmp_path) == "not_due"
    bucket.put("text/1.txt", b"the ship sails on")
    assert word(spec, tmp_path) == "due"
    bucket.delete("text/1.txt")
    assert word(spec, tmp_path) == "not_due"
    bucket.put("text/0.txt", b"the sea is dark")
    assert word(spec, tmp_path) == "due"


def test_a_commit_to_the_branch_makes_one_due_if_it_changes_the_data(
    make_champion: MakeChampion, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    (repository / "data").mkdir(parents=True)
    (repository / "data/0.txt").write_text("the sea is wide")
    commit(repository, "data")
    spec = spec_over("tracked", f"{{uri: 'dvc:data', repo: '{repository}', revision: main}}")
    make_champion(spec)
    assert word(spec, tmp_path) == "not_due"
    (repository / "README").write_text("more about it")
    commit(repository, "data")
    assert word(spec, tmp_path) == "not_due"
    (repository / "data/1.txt").write_text("the ship sails on")
    commit(repository, "data")
    assert word(spec, tmp_path) == "due"
