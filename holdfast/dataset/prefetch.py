"""Prefetcher of batches for the trainer, in one thread. Its only state is the step, so dropping it loses nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from holdfast.dataset.batches import Batches, Rows

Item = tuple[int, NDArray[np.int64]]


class Prefetcher:
    """Iterates over (step, rows of the batch of that step) from `start` to `stop`, or endlessly without `stop`.

    Keeps up to `depth` batches ready. Use it as a context manager, or call `close`.
    """

    def __init__(
        self, batches: Batches, rows: Rows = slice(None), start: int = 0, depth: int = 2, stop: int | None = None
    ) -> None:
        self._ready: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=max(1, depth))
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._read, args=(batches, rows, start, stop), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        while not self._closed.is_set():
            item = self._ready.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                self.close()
                raise item
            yield item

    def close(self) -> None:
        """Stop reading. Returns after the thread has ended."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # frees a thread that waits for space
            except queue.Empty:
                continue
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, batches: Batches, rows: Rows, step: int, stop: int | None) -> None:
        try:
            while not self._closed.is_set() and (stop is None or step < stop):
                self._ready.put((step, batches.batch(step, rows)))
                step += 1
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is asked for
            self._ready.put(error)
