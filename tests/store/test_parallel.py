"""Concurrent work, as far as no store is involved."""

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.store import parallel
from holdfast.store.parallel import THREADS, in_parallel


class Item:
    """An item of a generator, for example a buffer."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("last", [0, THREADS - 1])
def test_an_item_lives_no_longer_than_the_work_on_it(last: int) -> None:
    references: list[weakref.ref[Item]] = []
    others_drew = threading.Event()
    together = threading.Barrier(THREADS)  # each thread has one of the first items, and then one of the next

    def items() -> Iterator[Item]:
        for number in range(2 * THREADS):
            item = Item(number)
            references.append(weakref.ref(item))
            if len(references) == 2 * THREADS - 1:
                others_drew.set()
            yield item
            del item

    def work(item: Item) -> list[int]:
        together.wait(300.0)
        if item.number == last:  # the thread that draws last keeps nothing of its first item
            assert others_drew.wait(300.0)
        return [
            number
            for number, reference in enumerate(references[:THREADS])
            if reference() is not None and item.number >= THREADS
        ]

    assert in_parallel(work, items()) == [[]] * 2 * THREADS


def test_few_tasks_use_no_more_threads_than_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[object] = []

    class Counted(ThreadPoolExecutor):
        def submit(self, *what: Any, **more: Any) -> Any:
            tasks.append(what)
            return super().submit(*what, **more)

    monkeypatch.setattr(parallel, "ThreadPoolExecutor", Counted)
    assert in_parallel(lambda number: number, range(3)) == [0, 1, 2]
    assert len(tasks) == 3
    assert in_parallel(lambda number: number, range(30)) == list(range(30))
    assert len(tasks) == 3 + THREADS
