"""Answers to one HTTP request: their jobs in the batch, and their text as a whole or as a stream of events."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from holdfast.inference.batch import AnswerBatch, AnswerJob, BusyError, End, TokenSampling
from holdfast.inference.model import AnsweringModel, Ends, TextStream
from holdfast.inference.protocol import AnswerRequest, AnswerText, choice, problem, usage

CHAT, COMPLETION = "chat.completion", "text_completion"


class Counters:
    """What the server has answered since it started."""

    def __init__(self, running: Callable[[], int], queued: Callable[[], int]) -> None:
        """`running` and `queued` count the answers that are generated, and those that wait."""
        self._registry = CollectorRegistry()
        self.requests = self._counter("holdfast_requests", "Accepted requests.")
        self.refused = self._counter("holdfast_requests_refused", "Requests refused because the queue was full.")
        self.tokens = self._counter("holdfast_generated_tokens", "Tokens of answers.")
        for name, text, count in (
            ("holdfast_answers_running", "Answers that are being generated.", running),
            ("holdfast_answers_waiting", "Answers that wait for a row of the batch.", queued),
        ):
            Gauge(name, text, registry=self._registry).set_function(count)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def text(self) -> bytes:
        """The counters in Prometheus' text format."""
        return generate_latest(self._registry)


@dataclass(frozen=True)
class Limits:
    """Bounds of what clients send and of the work for it."""

    rows: int = 8  # answers that are generated concurrently
    waiting: int = 64  # answers that wait
    body_bytes: int = 4 * 2**20
    max_tokens: int | None = None  # of an answer; None: the model's context
    seconds: float = 600.0  # for a request, from its first byte to the last one of its answer
    body_seconds: float = 30.0


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
        self.status, self.body = status, problem(message, kind if status < 500 else "server_error", code, field)


class Answers:
    """The answers to one request: a job of the batch for each."""

    def __init__(
        self,
        model: AnsweringModel,
        batch: AnswerBatch,
        counters: Counters,
        request: AnswerRequest,
        ends: Ends,
        limits: Limits,
    ) -> None:
        self._model, self._batch, self._counters, self._request, self._ends = model, batch, counters, request, ends
        self._limits, self._deadline = limits, time.monotonic() + limits.seconds
        self._events: asyncio.Queue[tuple[int, int | End]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._jobs: list[AnswerJob] = []
        self._prompt_tokens = 0

    def add(self, prompt: list[int], adapter: str) -> None:
        """Prepare the answers to a prompt."""
        wanted, limits = self._request, self._limits
        most = min(size for size in (self._model.context - len(prompt), wanted.most_tokens, limits.max_tokens) if size)
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        self._prompt_tokens += len(prompt)
        for number in range(wanted.n or 1):
            sampling = TokenSampling(
                1.0 if wanted.temperature is None else wanted.temperature, wanted.top_p or 1.0, seed, number
            )
            emit = self._emitter(len(self._jobs))
            self._jobs.append(AnswerJob(prompt, most, sampling, emit, self._ends.tokens, adapter, self._deadline))
        if len(self._jobs) > limits.rows + limits.waiting:
            raise RequestError(400, f"at most {limits.rows + limits.waiting} answers are possible in a request")

    def submit(self) -> None:
        """Queue all answers, or none if they do not fit."""
        for job in self._jobs:
            try:
                self._batch.submit(job)
            except BusyError as error:
                self.cancel()
                self._counters.refused.inc()
                raise RequestError(429, str(error), "queue_full") from None
        self._counters.requests.inc()

    def cancel(self) -> None:
        """End what still runs."""
        for job in self._jobs:
            job.cancelled = True

    @property
    def usage(self) -> dict[str, int]:
        """The tokens so far."""
        return usage(self._prompt_tokens, sum(job.written for job in self._jobs))

    async def whole(self) -> list[AnswerText]:
        """All answers, when they are complete. Raises RequestError."""
        texts = [""] * len(self._jobs)
        reasons: dict[int, AnswerText] = {}
        async with aclosing(self._parts()) as parts:
            async for index, answer in parts:
                texts[index] += answer.text
                if answer.finish_reason is not None:
                    reasons[index] = answer
        return [AnswerText(text=text, finish_reason=reasons[index].finish_reason) for index, text in enumerate(texts)]

    async def chunks(self, kind: str, head: Mapping[str, Any]) -> AsyncIterator[str]:
        """The stream of server-sent events."""
        options, begun = self._request.stream_options, set[int]()
        counted = options is not None and bool(options.include_usage)
        empty = {"usage": None} if counted else {}
        try:
            async with aclosing(self._parts()) as parts:
                async for index, answer in parts:
                    listed = [choice(kind, index, answer, first=index not in begun, chunk=True)]
                    begun.add(index)
                    yield _event({**head, "choices": listed, **empty})
        except RequestError as error:
            yield _event(error.body)
            return
        if counted:
            yield _event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"

    async def _parts(self) -> AsyncGenerator[tuple[int, AnswerText], None]:
        """Parts of the answers as they come; the last one of each has its reason. What runs is cancelled with it."""
        texts = [TextStream(self._model.tokenizer, (*self._request.stop, *self._ends.text)) for _ in self._jobs]
        running = set(range(len(self._jobs)))
        try:
            while running:
                left = max(self._deadline - time.monotonic(), 0)
                index, event = await asyncio.wait_for(self._events.get(), left)
                if index not in running:
                    continue
                if isinstance(event, int):
                    text = texts[index].add(event)
                    self._counters.tokens.inc()
                    if texts[index].stopped:
                        self._jobs[index].cancelled = True
                        running.discard(index)
                        yield index, AnswerText(text=text, finish_reason="stop")
                    elif text:
                        yield index, AnswerText(text=text)
                    continue
                if event.reason == "deadline":
                    raise TimeoutError
                if event.reason not in ("stop", "length"):
                    raise RequestError(500, event.message or "the answer was cancelled")
                running.discard(index)
                reason: Literal["stop", "length"] = "stop" if event.reason == "stop" else "length"
                yield index, AnswerText(text=texts[index].finish(), finish_reason=reason)
        except TimeoutError:
            message = f"the answer was not complete after {self._limits.seconds:g} s; ask for fewer tokens"
            raise RequestError(504, message, "deadline") from None
        finally:
            self.cancel()

    def _emitter(self, index: int) -> Callable[[int | End], None]:
        def emit(event: int | End) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return emit


def _event(body: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
