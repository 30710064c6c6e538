"""A store in a folder, for tests that do not depend on the kind of store. Launches are forked from one server."""

import pytest

from tests.checkpoint.conftest import folder_store
from tests.kept_server import launches_of_one_server

__all__ = ["folder_store", "launches_of_one_server"]


@pytest.fixture(autouse=True)
def use_one_server(launches_of_one_server: None) -> None:
    """One server for all tests."""
