"""The simulation's store passes the contract tests of every store."""

import pytest

from holdfast.store import Store
from tests.protocol.bucket import Bucket, MemoryStore
from tests.store import test_contract
from tests.store.test_contract_concurrent import test_of_many_threads_exactly_one_takes_a_key as one_takes_a_key

OTHERS = {"test_the_url_opens_the_same_store_again"}  # a store in memory cannot be opened by its URL
CONTRACT = {**vars(test_contract), one_takes_a_key.__name__: one_takes_a_key}
globals().update({name: test for name, test in CONTRACT.items() if name.startswith("test_") and name not in OTHERS})
small_parts = test_contract.small_parts


@pytest.fixture
def store() -> Store:
    """An empty store that lists three keys per page."""
    return MemoryStore(Bucket(), page=3)


def test_an_object_that_is_written_while_another_page_is_read_shows_in_its_place(store: MemoryStore) -> None:
    for name in ("a", "b", "c", "e"):
        store.put(name, b"")
    listing = store.list("")
    assert next(listing).key == "a"
    store.put("a0", b"")  # before the current page
    store.put("d", b"")  # after the current page
    assert [info.key for info in listing] == ["b", "c", "d", "e"]
