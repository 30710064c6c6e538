"""A store in a folder, for tests that do not depend on the kind of store."""

from __future__ import annotations

from tests.checkpoint.conftest import folder_store

__all__ = ["folder_store"]
