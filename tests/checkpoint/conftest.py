"""A store in a folder, for what does not depend on the kind of store."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.components.store import Store, open_store


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """An empty store in a folder."""
    return open_store(f"file://{tmp_path / 'store'}")
