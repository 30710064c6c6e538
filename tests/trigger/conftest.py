"""A champion that was really trained, evaluated and registered, and a way to ask for decisions about it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.components.trigger import Decision, run
from holdfast.spec import load_spec
from holdfast.store import Store, open_store
from tests.whole.small import register_champion, write_corpus, write_spec

Ask = Callable[..., Decision]


@pytest.fixture(scope="module")
def champion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the model of the small spec is a registered champion."""
    folder = tmp_path_factory.mktemp("champion")
    write_corpus(folder)
    write_spec(folder)
    register_champion(folder)
    return folder


@pytest.fixture
def world(champion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the champion's corpus and spec, over the champion's store and MLflow."""
    monkeypatch.setenv("HOLDFAST_HOME", str(champion / "home"))
    for name in ("HOLDFAST_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(champion / "corpus", tmp_path / "corpus")
    shutil.copy(champion / "spec.yaml", tmp_path)
    return tmp_path


@pytest.fixture
def store(champion: Path) -> Store:
    """The champion's store."""
    return open_store(f"file://{champion / 'home/store'}")


@pytest.fixture
def ask(world: Path, store: Store) -> Ask:
    """Decide whether a retraining of the world's spec is due, with some fields changed."""

    def ask(*overrides: str, **more: Any) -> Decision:
        return run(load_spec(world / "spec.yaml", overrides), store, **more)

    return ask
