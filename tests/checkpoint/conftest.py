"""A store in a folder, for tests that do not depend on the kind of store."""

from pathlib import Path

import pytest

from holdfast.store import Store, open_store
from tests.checkpoint.saving import checkpointer, save


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """An empty store in a folder."""
    return open_store(f"file://{tmp_path / 'store'}")


@pytest.fixture
def two_steps(folder_store: Store) -> Store:
    """A store with checkpoints at steps 3 and 6."""
    writer = checkpointer(folder_store)
    save(writer, 3)
    save(writer, 6)
    return folder_store
