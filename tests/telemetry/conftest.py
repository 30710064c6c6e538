"""A store in a folder. tests/store covers its differences from S3; tests of events use both."""

from pathlib import Path

import pytest

from holdfast.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return open_store(f"file://{tmp_path / 'store'}")
