"""Large objects move to and from S3 in parts, several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

PART_BYTES = 32 * 2**20  # larger objects move in parts of this size...
MOST_PARTS = 10_000  # ...or of a larger one, for S3 takes no more parts than this
PARALLEL_PARTS = 8

Result = TypeVar("Result")


def in_parallel(work: Callable[[int], Result], items: Iterable[int]) -> list[Result]:
    """The results of `work` on every item, in order, PARALLEL_PARTS at a time; the first failure stops the rest."""
    with ThreadPoolExecutor(PARALLEL_PARTS, thread_name_prefix="holdfast-store") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
