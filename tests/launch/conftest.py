"""The launches of these tests are forked from one server."""

import pytest

from tests.kept_server import launches_of_one_server

__all__ = ["launches_of_one_server"]


@pytest.fixture(autouse=True)
def use_one_server(launches_of_one_server: None) -> None:
    """One server for all tests."""
