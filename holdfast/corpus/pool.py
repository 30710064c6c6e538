"""Tokenization on every core: a pool of processes that each take pieces, and end with their parent process."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from holdfast.corpus.units import Job, Outcome, Piece, tokenise
from holdfast.spec.errors import ExitCode, HoldfastError
from holdfast.store import Store, open_store

AHEAD = 4  # submitted pieces per worker


class WorkerDiedError(HoldfastError):
    """A tokenizing process was killed."""

    exit_code = ExitCode.KILLED


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenise_all(pieces: Sequence[Piece], job: Job, store: Store, workers: int) -> Iterator[Outcome]:
    """Tokenize the pieces with `workers` processes. Yields outcomes as they finish. Raises the first piece's error."""
    workers = min(workers, len(pieces))
    if workers <= 1:
        encoder = job.encoder()
        for piece in pieces:
            yield tokenise(piece, job, encoder, store)
        return
    context = multiprocessing.get_context("spawn")  # inherits no threads and connections of this process
    with ProcessPoolExecutor(workers, context, _start_worker, (job, store.url)) as pool:
        try:
            yield from _submitted(pool, pieces, workers)
        except BrokenProcessPool:
            raise WorkerDiedError(
                "a process that tokenised was killed, most likely for want of memory; lower data.workers or "
                "data.cleaning.max_characters, then run the same command again: finished work is kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _submitted(pool: ProcessPoolExecutor, pieces: Sequence[Piece], workers: int) -> Iterator[Outcome]:
    pending: set[Future[Outcome]] = set()
    remaining = iter(pieces)
    exhausted = False
    while pending or not exhausted:
        while not exhausted and len(pending) < AHEAD * workers:
            piece = next(remaining, None)
            if piece is None:
                exhausted = True
            else:
                pending.add(pool.submit(_work, piece))
        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in finished:
            yield future.result()


class _Worker:
    """State that a worker process keeps between pieces."""

    def __init__(self, job: Job, store_url: str) -> None:
        self.job = job
        self.store = open_store(store_url)
        self.encoder = job.encoder()


_worker: list[_Worker] = []


def _start_worker(job: Job, store_url: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()
    _worker[:] = [_Worker(job, store_url)]


def _die_with_parent() -> None:
    """End the worker when its parent was killed. Otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(ExitCode.KILLED)


def _work(piece: Piece) -> Outcome:
    (worker,) = _worker
    return tokenise(piece, worker.job, worker.encoder, worker.store)
