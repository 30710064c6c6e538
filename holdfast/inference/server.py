"""An HTTP server with OpenAI's API for one model and its adapters. Everything that a client sends is bounded."""

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from holdfast.inference.answers import CHAT, COMPLETION, Answers, Counters, Limits, RequestError
from holdfast.inference.batch import AnswerBatch
from holdfast.inference.model import AnsweringModel, Ends, PromptError
from holdfast.inference.protocol import AnswerRequest, ChatRequest, CompletionRequest, choice, problem
from holdfast.spec.errors import UsageError

API_KEY = "HOLDFAST_API_KEY"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DISCONNECT_SECONDS = 1.0  # between looks whether the client of a whole answer still waits
AnyRequest = TypeVar("AnyRequest", bound=AnswerRequest)


def api_key_for(host: str) -> str | None:
    """The key that clients must send, from the environment. Raises UsageError if another machine could use the server
    without one."""
    key = os.environ.get(API_KEY) or None
    if key is None and host not in LOOPBACK:
        raise UsageError(
            f"{host} can be reached from other machines, and {API_KEY} is not set",
            "--host",
            f"set {API_KEY}, or use 127.0.0.1",
        )
    return key


class AnswerServer:
    """The application. `name` is the name of the model, and `adapters` are the names of its adapters."""

    def __init__(
        self,
        model: AnsweringModel,
        name: str,
        batch: AnswerBatch,
        *,
        adapters: Sequence[str] = (),
        limits: Limits,
        key: str | None,
    ) -> None:
        self._model, self._batch, self._limits, self._key = model, batch, limits, key
        self._adapters = {name: "", **{adapter: adapter for adapter in adapters}}
        self._created = int(time.time())
        self._counters = Counters(lambda: batch.running, lambda: batch.queued)

    def app(self) -> Starlette:
        """The ASGI application. Without a key, only requests to names of this machine are answered: no page of another
        site can use the server through a browser."""
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
        ]
        hosts = ["127.0.0.1", "localhost", "[::1]"]
        middleware = [] if self._key else [Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)]
        handlers: Mapping[Any, Any] = {RequestError: _refused, HTTPException: _http_error}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def _health(self, _: Request) -> Response:
        alive = self._batch.alive
        return JSONResponse({"status": "ok" if alive else "ended"}, 200 if alive else 503)

    async def _metrics(self, request: Request) -> Response:
        self._authorize(request)
        return Response(self._counters.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._adapters]})

    async def _one_model(self, request: Request) -> Response:
        self._authorize(request)
        name = request.path_params["name"]
        self._adapter(name)
        return JSONResponse(self._described(name))

    async def _chat(self, request: Request) -> Response:
        wanted = await self._parse(request, ChatRequest)
        model, messages = self._model, [message.for_template() for message in wanted.messages]
        try:
            prompt = await run_in_threadpool(model.conversation_prompt, messages, wanted.tools)
        except PromptError as error:
            raise RequestError(400, str(error), "invalid_prompt", "messages") from None
        return await self._answer(request, wanted, [prompt], model.turn_ends, CHAT)

    async def _complete(self, request: Request) -> Response:
        wanted, model = await self._parse(request, CompletionRequest), self._model
        try:
            prompts = [
                await run_in_threadpool(model.text_prompt, prompt)
                if isinstance(prompt, str)
                else model.require_fit(prompt)
                for prompt in wanted.prompts
            ]
        except PromptError as error:
            raise RequestError(400, str(error), "invalid_prompt", "prompt") from None
        return await self._answer(request, wanted, prompts, model.text_ends, COMPLETION)

    async def _answer(
        self, request: Request, wanted: AnswerRequest, prompts: Sequence[list[int]], ends: Ends, kind: str
    ) -> Response:
        answers = Answers(self._model, self._batch, self._counters, wanted, ends, self._limits)
        for prompt in prompts:
            answers.add(prompt, self._adapter(wanted.model))
        answers.submit()
        answer_id = f"{'chatcmpl' if kind == CHAT else 'cmpl'}-{secrets.token_hex(12)}"
        head = {"id": answer_id, "created": int(time.time()), "model": wanted.model}
        if wanted.stream:
            chunks = answers.chunks(kind, {**head, "object": f"{CHAT}.chunk" if kind == CHAT else COMPLETION})
            return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        async with _cancelled_with(request, answers):
            choices = await answers.whole()
        listed = [choice(kind, index, answer) for index, answer in enumerate(choices)]
        return JSONResponse({**head, "object": kind, "choices": listed, "usage": answers.usage})

    async def _parse(self, request: Request, kind: type[AnyRequest]) -> AnyRequest:
        """The body of a request. A page of another site cannot send this content type without this server's consent,
        which it never gives."""
        self._authorize(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "the content type must be application/json")
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._body(request)
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive in {self._limits.body_seconds:g} s") from None
        except ClientDisconnect:
            raise RequestError(400, "the connection closed before the body ended") from None
        try:
            wanted = kind.model_validate_json(body)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            first = max(errors, key=lambda one: len(one["loc"]))  # of a union, the kind that fits best
            field = ".".join(str(part) for part in first["loc"])
            raise RequestError(
                400, f"{field}: {first['msg']}" if field else first["msg"], None, field or None
            ) from None
        self._adapter(wanted.model)
        return wanted

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limits.body_bytes:
                raise RequestError(413, f"the body is larger than {self._limits.body_bytes} bytes")
        return bytes(body)

    def _authorize(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._key.encode()):
            raise RequestError(401, "the API key is missing or wrong", "invalid_api_key")

    def _adapter(self, name: str) -> str:
        if name not in self._adapters:
            raise RequestError(
                404, f"no model {name!r}; use one of {', '.join(self._adapters)}", "model_not_found", "model"
            )
        return self._adapters[name]

    def _described(self, name: str) -> dict[str, Any]:
        parent = {"parent": next(iter(self._adapters))} if self._adapters[name] else {}
        described = {"id": name, "object": "model", "created": self._created, "owned_by": "holdfast", **parent}
        return {**described, "max_model_len": self._model.context}


@asynccontextmanager
async def _cancelled_with(request: Request, answers: Answers) -> AsyncIterator[None]:
    """Cancel the answers if their client leaves."""

    async def watch() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(DISCONNECT_SECONDS)
        answers.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 429 else {}
    return JSONResponse(error.body, error.status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(problem(str(error.detail), "invalid_request_error"), error.status_code)
