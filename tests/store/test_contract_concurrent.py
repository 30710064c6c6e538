"""The contract of every store under concurrency, checked on a folder and on a real S3 over HTTP."""

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.spec.errors import StoreRefusedError
from holdfast.store import ConflictError, Store, open_store
from holdfast.store.cloud import CloudStore

COPY = """
import sys
from holdfast.store import open_store
store = open_store(sys.argv[1])
store.put("child", store.get("k"))
"""


@pytest.mark.slow
def test_of_many_threads_exactly_one_takes_a_key(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.put_if_absent("claim", b"writer %d" % n), range(48)))
    assert won.count(True) == 1
    assert store.get("claim") == b"writer %d" % won.index(True)


def _increment(url: str, times: int, met: threading.Barrier | None = None) -> int:
    """Add 1 this many times. The first time starts when all participants have read the value. Returns the number of
    conflicts with other writers.
    """
    store, conflicts = open_store(url), 0
    for _ in range(times):
        while True:
            content, version = store.get_versioned("counter")
            if met is not None:
                met.wait()
                met = None
            try:
                store.compare_and_swap("counter", b"%d" % (int(content) + 1), version)
                break
            except ConflictError:
                conflicts += 1
    return conflicts


def _claim(url: str, number: int) -> bool:
    return open_store(url).put_if_absent("claim", b"process %d" % number)


@pytest.mark.slow
def test_a_counter_loses_no_increment_of_many_threads(store: Store) -> None:
    store.compare_and_swap("counter", b"0", None)
    met = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        conflicts = sum(pool.map(lambda _: _increment(store.url, 5, met), range(8)))
    assert store.get("counter") == b"40"
    assert conflicts >= 7


def test_processes_neither_share_a_claim_nor_lose_an_increment(store: Store) -> None:
    store.compare_and_swap("counter", b"0", None)
    start = "spawn" if isinstance(store, CloudStore) else "fork"  # forked with open connections of the store
    with multiprocessing.get_context(start).Pool(4) as pool:
        won = pool.starmap(_claim, [(store.url, number) for number in range(8)])
        pool.starmap(_increment, [(store.url, 5)] * 4)
        pool.close()  # otherwise they get SIGTERM, which a process with an inherited handler may miss
        pool.join()
    assert won.count(True) == 1
    assert store.get("claim") == b"process %d" % won.index(True)
    assert store.get("counter") == b"20"


def test_a_store_opened_before_a_fork_works_after_it(store: Store) -> None:
    store.put("k", b"1")
    child = os.fork()
    if child == 0:
        try:
            if isinstance(store, CloudStore):  # its threads are not in the child, which says so instead of waiting
                with pytest.raises(StoreRefusedError, match="forked"):
                    store.get("k")
                os.execv(sys.executable, [sys.executable, "-c", COPY, store.url])
            store.put("child", store.get("k"))
            os._exit(0)
        finally:
            os._exit(1)
    store.put("parent", store.get("k"))
    assert os.waitpid(child, 0)[1] == 0
    assert [info.key for info in store.list("")] == ["child", "k", "parent"]
