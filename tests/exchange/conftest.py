"""The store of these tests."""

from tests.checkpoint.conftest import folder_store

__all__ = ["folder_store"]
