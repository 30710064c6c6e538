"""The store of these tests."""

from __future__ import annotations

from tests.checkpoint.conftest import folder_store

__all__ = ["folder_store"]
