"""Concurrent work in threads that live for one call: parts of a large object, ranges of many objects.

Items are drawn as threads become free, so that a generator that creates them bounds the memory. After the first failure
nothing more is begun.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from holdfast.store.durable import whole_file
from holdfast.store.interface import Read

PART_BYTES = 32 * 2**20  # larger objects move in parts of this size...
MOST_PARTS = 10_000  # ...or larger, since S3 takes no more parts than this
THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item], concurrency: int = THREADS) -> list[Result]:
    """The results of `work` on every item, in their order, `concurrency` at a time. Raises the failure of the earliest
    item that failed. Beyond the first `concurrency` items, an item that is never begun is never drawn."""
    source = iter(items)
    first = list(itertools.islice(source, concurrency))  # to start no thread without work
    if len(first) < 2:
        return [work(item) for item in first]
    threads, numbers = len(first), itertools.count()
    # An item lives no longer than the work on it. `enumerate` would keep one: the tuple that it reuses.
    source = itertools.chain(iter(first), source)
    del first
    turn = threading.Lock()
    results: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}
    stopped = threading.Event()

    def work_off() -> None:
        number = -1
        try:
            while not stopped.is_set():
                with turn:
                    drawn = [*itertools.islice(source, 1)]
                    number = next(numbers)
                if not drawn:
                    return
                results[number] = work(drawn.pop())
        except BaseException as failure:
            failures[number] = failure
            stopped.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-store") as pool:
        try:
            wait([pool.submit(work_off) for _ in range(threads)])
        finally:
            stopped.set()
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in range(len(results))]


def download(path: Path, key: str, size: int, fill: Callable[[int, memoryview], None]) -> None:
    """Implements `Store.download` of an object of `size` bytes. `fill` reads a part of it, from a position."""
    with whole_file(path, key) as descriptor:
        os.truncate(descriptor, size)

        def fetch(start: int) -> None:
            block = memoryview(bytearray(min(PART_BYTES, size - start)))
            fill(start, block)
            while block.nbytes:
                count = os.pwrite(descriptor, block, start)
                start, block = start + count, block[count:]

        in_parallel(fetch, range(0, size, PART_BYTES))


def read_many(read_into: Callable[[str, int, memoryview], None], reads: Iterable[Read]) -> None:
    """Implements `Store.read_many` by the `read_into` of a store."""

    def read(wanted: Read) -> None:
        read_into(wanted.key, wanted.start, wanted.target)
        wanted.use()

    in_parallel(read, reads)
