"""Continuous batching: concurrent requests share the steps of one decoder, and each joins and leaves at any step.

A batch has a fixed number of rows. Free rows are computed as padding, because the bits of a matrix product depend on
its height. A prompt is read alone. The tokens of a request therefore depend on its prompt, its sampling and its seed,
and not on the requests that run at the same time.

Shape suffixes: as in `decoder`; B rows of the batch.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from holdfast.inference.adapters import AdapterRows, LowRank
from holdfast.model.decoder import Decoder, LayerCache
from holdfast.model.generate import fitting_threads
from holdfast.rollouts.caches import RowsCache, advance_rows
from holdfast.rollouts.generation import sample_tokens, uniforms

log = logging.getLogger("holdfast.inference")
PART = 256  # positions by which the caches grow; a multiple of all vector widths, so padding changes no sum
IDLE_SECONDS = 0.5  # between looks at the end, without requests

Reason = Literal["stop", "length", "deadline", "cancelled", "error"]


class BusyError(Exception):
    """All rows and all places of the queue are taken."""


@dataclass(frozen=True)
class TokenSampling:
    """How tokens are chosen. Temperature 0 takes the likeliest one."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    number: int = 0  # of several answers to one request


@dataclass(frozen=True)
class End:
    """The end of an answer."""

    reason: Reason
    message: str = ""


@dataclass
class AnswerJob:
    """A request. `emit` gets each token, and then the End, on the thread of the batch."""

    prompt: list[int]
    most: int  # tokens of the answer
    sampling: TokenSampling
    emit: Callable[[int | End], None]
    stops: frozenset[int] = frozenset()
    adapter: str = ""
    deadline: float = float("inf")  # of time.monotonic()
    cancelled: bool = False
    written: int = 0
    uniforms: list[float] = field(default_factory=list)

    def next_token(self, logits_V: Tensor) -> int:
        """Choose the next token."""
        sampling = self.sampling
        if sampling.temperature == 0:
            return int(logits_V.argmax())
        if not self.uniforms:
            self.uniforms = uniforms(sampling.seed, 0, sampling.number, self.most)
        if sampling.top_p < 1:
            logits_V = within_mass(logits_V.double() / sampling.temperature, sampling.top_p) * sampling.temperature
        u_B = torch.tensor([self.uniforms[self.written]], dtype=torch.float64)
        return int(sample_tokens(logits_V[None], u_B, sampling.temperature)[0])


def within_mass(scaled_V: Tensor, mass: float) -> Tensor:
    """The logits of the likeliest tokens whose probabilities sum up to at least `mass`; -inf for all remaining ones."""
    shares_V, order_V = scaled_V.softmax(-1).sort(descending=True, stable=True)
    surplus_V = shares_V.cumsum(-1) - shares_V >= mass
    return scaled_V.masked_fill(torch.zeros_like(surplus_V).scatter(0, order_V, surplus_V), float("-inf"))


class AnswerBatch:
    """Answers requests on its own thread, `rows` of them concurrently. `waiting` more are queued."""

    def __init__(
        self,
        decoder: Decoder,
        rows: int,
        *,
        waiting: int = 0,
        adapters: Mapping[str, Mapping[str, LowRank]] | None = None,
    ) -> None:
        self._decoder, self._height = decoder, rows
        self._adapters = AdapterRows(decoder, adapters or {})
        self._queue: queue.Queue[AnswerJob] = queue.Queue()
        self._places = threading.BoundedSemaphore(rows + waiting)
        self._jobs: list[AnswerJob | None] = [None] * rows
        self._ending = threading.Event()
        self._clear()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """The number of requests that are being answered."""
        return sum(job is not None for job in self._jobs)

    @property
    def queued(self) -> int:
        """The number of requests that wait for a row."""
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread.is_alive() and not self._ending.is_set()

    def submit(self, job: AnswerJob) -> None:
        """Queue a request. Raises BusyError if the queue is full."""
        if not self._places.acquire(blocking=False):
            raise BusyError("too many requests are waiting; try again later")
        self._queue.put(job)

    def close(self) -> None:
        """End the thread. Running requests end as cancelled."""
        self._ending.set()
        self._thread.join()

    def _clear(self) -> None:
        """Empty caches, without positions."""
        self._caches = [RowsCache() for _ in range(self._decoder.shape.layers)]
        self._token_B = torch.zeros(self._height, dtype=torch.int64)
        self._at_B = torch.zeros(self._height, dtype=torch.int64)

    @torch.inference_mode()
    def _run(self) -> None:
        with fitting_threads(self._decoder):
            while not self._ending.is_set():
                try:
                    self._admit()
                    if self.running:
                        self._step()
                except Exception as error:  # out of memory, or a defect: the server answers the next requests
                    log.exception("%d requests failed", self.running)
                    for row, job in enumerate(self._jobs):
                        if job is not None:
                            self._end(row, End("error", f"{type(error).__name__}: {error}"[:500]))
                    self._clear()
        for row, job in enumerate(self._jobs):
            if job is not None:
                self._end(row, End("cancelled", "the server ends"))
        while not self._queue.empty():
            self._queue.get().emit(End("cancelled", "the server ends"))

    def _admit(self) -> None:
        """Give free rows to waiting requests. Without any request, wait for one."""
        for row in [row for row, job in enumerate(self._jobs) if job is None]:
            try:
                job = self._queue.get(timeout=None if self.running else IDLE_SECONDS, block=not self.running)
            except queue.Empty:
                return
            self._jobs[row] = job
            if self._is_over(row, job):
                continue
            self._take(row, job, self._read_prompt(row, job))

    def _read_prompt(self, row: int, job: AnswerJob) -> Tensor:
        """Read a prompt alone, and copy its keys and values into a row. Returns the logits of the first token."""
        device = self._decoder.model.embed_tokens.weight.device
        alone = [LayerCache() for _ in self._caches]
        self._adapters.rows = [job.adapter]
        x_1TD = self._decoder.hidden(torch.tensor([job.prompt], device=device), cache=alone)
        logits_V: Tensor = self._decoder.head(x_1TD[:, -1:])[0, 0]
        needed = min(-(-(len(job.prompt) + job.most) // PART) * PART, self._decoder.shape.context)
        for cache, own in zip(self._caches, alone, strict=True):
            assert own.k_BGSK is not None
            assert own.v_BGSK is not None
            cache.k_BGSK = self._grown(cache.k_BGSK, own.k_BGSK, needed)
            cache.v_BGSK = self._grown(cache.v_BGSK, own.v_BGSK, needed)
            cache.k_BGSK[row, :, : len(job.prompt)] = own.k_BGSK[0]
            cache.v_BGSK[row, :, : len(job.prompt)] = own.v_BGSK[0]
        self._at_B[row] = len(job.prompt)
        return logits_V

    def _grown(self, x_BGSK: Tensor | None, like_1GTK: Tensor, needed: int) -> Tensor:
        """The cache with at least `needed` positions."""
        if x_BGSK is not None and x_BGSK.shape[2] >= needed:
            return x_BGSK
        _, groups, _, width = like_1GTK.shape
        grown_BGSK = like_1GTK.new_zeros(self._height, groups, needed, width)
        if x_BGSK is not None:
            grown_BGSK[:, :, : x_BGSK.shape[2]] = x_BGSK
        return grown_BGSK

    def _step(self) -> None:
        """One token of each running request."""
        device = self._decoder.model.embed_tokens.weight.device
        self._adapters.rows = [None if job is None else job.adapter for job in self._jobs]
        logits_BV = advance_rows(self._decoder, self._caches, self._token_B.to(device), self._at_B.to(device)).cpu()
        self._at_B += 1
        for row, job in enumerate(self._jobs):
            if job is None:
                self._at_B[row] = 0
            elif not self._is_over(row, job):
                self._take(row, job, logits_BV[row])

    def _is_over(self, row: int, job: AnswerJob) -> bool:
        """End a request that was cancelled, or whose time is over."""
        if job.cancelled or time.monotonic() > job.deadline:
            self._end(row, End("cancelled" if job.cancelled else "deadline"))
            return True
        return False

    def _take(self, row: int, job: AnswerJob, logits_V: Tensor) -> None:
        token = job.next_token(logits_V.cpu())
        job.written += 1
        if token in job.stops:
            self._end(row, End("stop"))
            return
        self._token_B[row] = token
        job.emit(token)
        if job.written == job.most:
            self._end(row, End("length"))

    def _end(self, row: int, end: End) -> None:
        job = self._jobs[row]
        assert job is not None
        self._jobs[row] = None
        self._at_B[row] = 0
        self._token_B[row] = 0
        self._places.release()
        job.emit(end)
