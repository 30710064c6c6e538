"""Reads from S3 with a faulty network or server: complete and from one version, or an error."""

import os
import threading
from pathlib import Path

import pytest

from holdfast.pipelines.chaos.proxy import (
    FaultyProxy,
    Forward,
    Reply,
    Request,
    answer,
    flip,
    hold,
    reset,
    stall,
    truncate,
)
from holdfast.spec.errors import (
    AccessDeniedError,
    DataError,
    HoldfastError,
)
from holdfast.store import ConflictError, Store, open_store
from holdfast.store.s3 import reads


@pytest.fixture
def store(proxied: Store) -> Store:
    """The store behind the proxy."""
    return proxied


def test_a_truncated_body_is_read_again(store: Store, proxy: FaultyProxy) -> None:
    content = os.urandom(100_000)
    store.put("k", content)
    for read in (
        lambda: store.get("k"),
        lambda: store.get("k", 0, 100_000),
        lambda: store.get_versioned("k")[0],
    ):
        faults = [proxy.inject(truncate(size), method="GET") for size in (0, 1, 99_999)]
        assert read() == content
        assert [fault.hits for fault in faults] == [1, 1, 1]


def test_a_body_with_a_flipped_bit_is_read_again(store: Store, proxy: FaultyProxy) -> None:
    store.put("k", b"0123456789")
    fault = proxy.inject(flip(3), method="GET")
    assert store.get("k") == b"0123456789"
    assert fault.hits == 1


def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(
    store: Store, proxy: FaultyProxy, large: bytes, tmp_path: Path
) -> None:
    store.put("big", large)

    def replace(request: Request, forward: Forward) -> Reply:
        proxy.heal()
        store.put("big", bytes(len(large)))
        return forward(request)

    proxy.inject(replace, method="GET", skip=1)
    with pytest.raises(ConflictError, match="replaced while it was read"):
        store.download("big", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
    store.put("big", large)
    proxy.inject(replace, method="GET", skip=1)
    with pytest.raises(ConflictError, match="replaced while it was read"):
        store.get("big")


def test_a_download_is_whole_or_not_there(store: Store, proxy: FaultyProxy, large: bytes, tmp_path: Path) -> None:
    store.put("big", large)
    proxy.inject(truncate(1000), method="GET", times=2)
    store.download("big", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == large
    proxy.inject(answer(403, "AccessDenied"), method="GET", skip=2, times=None)
    with pytest.raises(AccessDeniedError):
        store.download("big", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_range_beyond_the_end_is_not_repeated(store: Store, proxy: FaultyProxy) -> None:
    store.put("k", b"0123456789")
    before = len(proxy.requests)
    with pytest.raises(DataError, match="has 10 bytes"):
        store.get("k", 5, 6)
    assert len(proxy.requests) - before == 1


def test_a_listing_of_many_pages_is_whole(store: Store, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "PAGE_KEYS", 3)
    for number in range(10):
        store.put(f"many/{number}", b"")
    fault = proxy.inject(reset(), method="GET", path="continuation-token", skip=1)
    assert [info.key for info in store.list("many/")] == [f"many/{number}" for number in range(10)]
    assert fault.hits == 1


def test_a_body_that_stops_in_the_middle_is_read_again(s3_url: str, proxy: FaultyProxy, large: bytes) -> None:
    store = open_store(s3_url, deadline=15)
    store.put("big", large)
    release = threading.Event()
    faults = [proxy.inject(stall(1000, release), method="GET") for _ in range(2)]
    assert store.get("big") == large
    release.set()
    assert [fault.hits for fault in faults] == [1, 1]


def test_ranges_of_two_versions_are_not_mixed(store: Store, proxy: FaultyProxy, large: bytes, s3_url: str) -> None:
    """All parts are requested concurrently, before any reply names its version."""
    store.put("big", large)
    release = threading.Event()
    late = proxy.inject(hold(release), method="GET", skip=1)
    errors: list[HoldfastError] = []

    def read() -> None:
        try:
            store.read_into("big", 0, memoryview(bytearray(len(large))))
        except ConflictError as error:
            errors.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    assert late.hit.wait(180)
    open_store(s3_url).put("big", bytes(len(large)))
    release.set()
    reading.join()
    assert "replaced while it was read" in str(errors[0])
