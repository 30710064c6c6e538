"""Numbered records: few requests find the newest of very many, and a damaged record is named."""

import random
from collections.abc import Iterator

import pytest

from holdfast.spec.errors import BadReaderError
from holdfast.store.interface import ObjectInfo
from holdfast.store.sequence import newest, read_record, record_key, records, take_next
from tests.protocol.bucket import Bucket, MemoryStore


class Counted(MemoryStore):
    """Counts the pages of its listings."""

    pages = 0

    def _request(self, operation: str, key: str, effect, again=None):  # type: ignore[no-untyped-def]
        self.pages += operation == "list"
        return super()._request(operation, key, effect, again)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return super().list(prefix, after)


def filled(numbers: list[int]) -> Counted:
    """Records with these numbers, each with a second file of another suffix."""
    store = Counted(Bucket())
    for number in numbers:
        for key in (record_key("f/", number), f"f/{number:06d}.ending.json"):
            store.bucket.write(key, b"{}")
    return store


def test_the_newest_of_ten_thousand_is_found_with_few_listings() -> None:
    store = filled(list(range(1, 10_001)))
    assert newest(store, "f/") == 10_000
    assert store.pages <= 12
    store.pages = 0
    assert [number for number, _ in records(store, "f/", after=9_998)] == [9_999, 10_000]
    assert store.pages == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_record_is_found_with_gaps_and_other_files(seed: int) -> None:
    random_ = random.Random(seed)
    numbers = random_.sample(range(1, random_.choice((10, 2_000, 12_000, 2_000_000))), random_.choice((0, 1, 8, 5)))
    numbers += list(range(1, random_.choice((1, 600, 3_000))))
    store = filled(numbers)
    for number in range(random_.choice((0, 1_500))):
        store.bucket.write(f"f/000001.else-{number}", b"")
    assert newest(store, "f/") == max(numbers, default=0)
    after = random_.randrange(1, 3_000)
    assert [number for number, _ in records(store, "f/", after)] == sorted(n for n in set(numbers) if n > after)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"{", b"[]", b"\xff"])
def test_a_damaged_record_is_reported_with_a_remedy_and_the_next_number_is_free(data: bytes) -> None:
    store = filled([1])
    store.put(record_key("f/", 2), data)
    with pytest.raises(BadReaderError, match=r"f/000002\.json: is damaged .*run the same command again"):
        read_record(store, "f/", 2)
    assert take_next(store, "f/", {}) == 3
