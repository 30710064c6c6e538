"""The store of a run of generated answers."""

from pathlib import Path

import pytest

from holdfast.store import Store, open_store
from tests.rollouts.prompt_run import write_prompts


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the prompts."""
    store = open_store(f"file://{tmp_path / 'store'}")
    write_prompts(store)
    return store
