"""Batch of a training step: a pure function of (dataset, seed, step). There is no loader state to save."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.dataset.mixture import UniformOrder, WeightedOrder
from holdfast.dataset.permutation import Indices
from holdfast.dataset.stream import ACROSS, TokenStream, copy_rows
from holdfast.spec.batch_sizes import BatchSizes

Rows = slice | Indices | Callable[[int], slice | Indices]  # of a global batch; or a function of its size
LOOKAHEAD = 4096  # positions resolved together: small batches share the cost of the permutation


class _Placed(NamedTuple):
    """The locations of consecutive samples: four int64 arrays of equal length."""

    source: Indices
    start: Indices  # in the source's stream, in tokens
    file: Indices  # over the files of all sources
    local: Indices  # in the file, in tokens


class Batches:
    """Training batches by step. Sample i of a source is its tokens i*context to i*context + context, both included."""

    def __init__(
        self, streams: Sequence[TokenStream], order: UniformOrder | WeightedOrder, context: int, sizes: BatchSizes
    ) -> None:
        self._streams = streams
        self._files = [file for stream in streams for file in stream.files]
        self._bases = [0, *accumulate(len(stream.files) for stream in streams)]
        self._order = order
        self.context = context
        self.sizes = sizes
        self._window: tuple[int, _Placed] | None = None

    @property
    def samples(self) -> int:
        """Samples per epoch, over all sources."""
        return sum(stream.samples(self.context) for stream in self._streams)

    def batch(self, step: int, rows: Rows = slice(None)) -> NDArray[np.int64]:
        """The rows `rows` of the global batch of `step` (from 0): int64 [rows, context + 1], where [:, :-1] are the
        inputs and [:, 1:] the targets. Reads only these rows. Raises DataError if a shard is damaged."""
        length, places = self.context + 1, self._places(step, rows)
        if not len(places):
            return np.empty((0, length), dtype=np.int64)
        placed = self._placed(places)
        return copy_rows(
            self._files,
            placed.file,
            placed.local,
            length,
            lambda row: self._streams[int(placed.source[row])].read(int(placed.start[row]), length),
        )

    def origins(self, step: int, rows: Rows = slice(None)) -> tuple[Indices, Indices]:
        """The origins of the same rows: the number of the source, and the position of the first token in it. Two
        int64 [rows]. Reads nothing."""
        source, sample = self._order(self._places(step, rows))
        return source, sample * self.context

    def _places(self, step: int, rows: Rows) -> Indices:
        """The sample numbers, counted over all steps, of some rows of a step."""
        if step < 0:
            raise ValueError(f"steps count from 0, not {step}")
        first, size = self.sizes.before(step), self.sizes.size(step)
        rows = rows(size) if callable(rows) else rows
        numbers = range(first, first + size)
        return np.array(numbers[rows], np.int64) if isinstance(rows, slice) else first + rows

    def _placed(self, places: Indices) -> _Placed:
        """The locations of the samples at `places`. The cache between calls is a pure function of the places."""
        number, last = int(places.min()) // LOOKAHEAD, int(places.max()) // LOOKAHEAD
        if number != last:
            return self._resolve(places)
        window = self._window
        base = number * LOOKAHEAD
        if window is None or window[0] != number:
            window = (number, self._resolve(np.arange(base, base + LOOKAHEAD, dtype=np.int64)))
            self._window = window
        return _Placed(*(array[places - base] for array in window[1]))

    def _resolve(self, places: Indices) -> _Placed:
        source, sample = self._order(places)
        start = sample * self.context
        file, local = np.empty_like(start), np.empty_like(start)
        for index, stream in enumerate(self._streams):
            chosen = source == index
            local_file, local[chosen] = stream.locate(start[chosen], self.context + 1)
            file[chosen] = np.where(local_file == ACROSS, ACROSS, local_file + self._bases[index])
        return _Placed(source, start, file, local)


# Prefetcher of batches for the trainer, in one thread. Its only state is the step, so dropping it loses nothing.

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
        except BaseException as error:  # noqa: BLE001 - raised again where the batch is requested
            self._ready.put(error)
