"""What is done several at once, as far as no store shows it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

from holdfast.components.store.parallel import THREADS, in_parallel


class Item:
    """What a generator makes: a buffer, say."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_an_item_lives_no_longer_than_the_work_on_it() -> None:
    made: list[weakref.ref[Item]] = []
    together = threading.Barrier(THREADS)  # each thread has one of the first items, and then one of the next

    def items() -> Iterator[Item]:
        for number in range(2 * THREADS):
            item = Item(number)
            made.append(weakref.ref(item))
            yield item
            del item

    def work(item: Item) -> list[int]:
        together.wait(60.0)
        return [number for number, each in enumerate(made[:THREADS]) if each() is not None and item.number >= THREADS]

    assert in_parallel(work, items()) == [[]] * 2 * THREADS


def test_what_is_few_starts_no_more_threads_than_that() -> None:
    together = threading.Barrier(3)

    def work(_: int) -> set[str]:
        together.wait(60.0)
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-store")}

    assert [len(each) for each in in_parallel(work, range(3))] == [3] * 3
