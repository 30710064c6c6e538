"""A store over a folder, a separate home, and a real MLflow registry that all tests of this folder share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.store import Store, open_store
from holdfast.tracking import connect
from tests import empty_mlflow
from tests.evaluate import world
from tests.registered import register_version

Champion = Callable[..., None]


@pytest.fixture(scope="session")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mlflow")
    empty_mlflow.place(folder)
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracking_uri: str) -> Iterator[None]:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads slow tiny models down
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with a dataset."""
    opened = open_store(f"file://{tmp_path / 'store'}")
    world.write_dataset(opened)
    return opened


@pytest.fixture
def make_champion(store: Store, tracking_uri: str) -> Champion:
    """Register a finished run as the next version of a model and make it champion."""

    def make_champion(model: str, run_id: str, export: str, where: Store = store, uri: str = tracking_uri) -> None:
        version = register_version(where, model, run_id, export, world.STATE, world.DATASET, uri)
        connect(uri).set_registered_model_alias(model, "champion", str(version))

    return make_champion
