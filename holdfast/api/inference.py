"""Answers of a model on this machine: a conversation, and an HTTP server."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.api.submission import open_store_at
from holdfast.spec.errors import MissingError, UsageError
from holdfast.store import Store

if TYPE_CHECKING:
    import torch

    from holdfast.inference.conversation import Conversation

LIMIT = 1024  # tokens of an answer in a conversation
KEEP_ALIVE_SECONDS = 15
GRACE_SECONDS = 10  # for running answers, when the server is stopped

log = logging.getLogger("holdfast.inference")


@dataclass(frozen=True)
class ServerSettings:
    """How a model is served on this machine. `adapters` are NAME=MODEL."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""  # of the model for clients; default: as it was located
    adapters: Sequence[str] = ()
    device: str = ""
    batch: int = 8  # answers that are generated concurrently
    waiting: int = 64  # answers that wait
    max_tokens: int | None = None  # of an answer
    timeout: float = 600.0  # seconds for a request


def chat(
    model: str,
    *,
    system: str = "",
    tokens: int = LIMIT,
    temperature: float = 0.7,
    seed: int = 0,
    device: str = "",
    store: str | Store = "",
) -> Conversation:
    """A conversation with a run, a registered model (name, name@alias, name/version) or a folder.

    Close it when it ends. Raises MissingError, DataError and UsageError.
    """
    from holdfast.pipelines.view.models import locate

    files = locate(model, open_store_at(store))  # before torch is imported
    from holdfast.inference.batch import TokenSampling
    from holdfast.inference.conversation import Conversation
    from holdfast.inference.model import AnsweringModel

    loaded = AnsweringModel.load(files, _device(device))
    return Conversation(loaded, system=system, most_tokens=tokens, sampling=TokenSampling(temperature, seed=seed))


def serve_here(
    model: str, settings: ServerSettings, *, store: str | Store = "", ready: Callable[[str], None] = lambda _: None
) -> None:
    """Serve a model with OpenAI's API on this machine, until the process is interrupted. `ready` gets the address.

    Raises MissingError, DataError, and UsageError for a port in use and for an open address without an API key.
    """
    from holdfast.pipelines.view.models import locate, locate_adapter

    opened = open_store_at(store)
    adapters = {}
    for text in settings.adapters:
        name, equals, place = text.partition("=")
        if not equals or not name or not place:
            raise UsageError(f"{text!r} is not NAME=MODEL, such as poet=runs/poet", "--adapter")
        adapters[name] = locate_adapter(place, opened)
    served = settings.name or model
    if served in adapters:
        raise UsageError(f"{served!r} names the model and an adapter", "--adapter", "give the adapter another name")
    files = locate(model, opened)
    import uvicorn

    from holdfast.inference.adapters import read_adapter
    from holdfast.inference.answers import Limits
    from holdfast.inference.batch import AnswerBatch
    from holdfast.inference.model import AnsweringModel
    from holdfast.inference.server import AnswerServer, api_key_for

    key = api_key_for(settings.host)
    listening = _listen(settings.host, settings.port)
    loaded = AnsweringModel.load(files, _device(settings.device))
    read = {name: read_adapter(place, loaded.decoder) for name, place in adapters.items()}
    batch = AnswerBatch(loaded.decoder, settings.batch, waiting=settings.waiting, adapters=read)
    limits = Limits(settings.batch, settings.waiting, max_tokens=settings.max_tokens, seconds=settings.timeout)
    server = AnswerServer(loaded, served, batch, adapters=list(read), limits=limits, key=key)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    config = uvicorn.Config(
        server.app(),
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        limit_concurrency=2 * (settings.batch + settings.waiting) + 16,  # connections, some of them idle
        server_header=False,
        lifespan="off",
    )
    ready(f"http://{host}:{listening.getsockname()[1]}/v1")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()
        batch.close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before minutes are spent on loading a model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        message = f"{host}:{port} cannot be listened on ({error.strerror or error})"
        raise UsageError(message, "--port", "use another port, or 0 for any free one") from None
    return listening


def _device(name: str) -> torch.device:
    """The device of this name. Default: an accelerator that torch can use, otherwise the CPU."""
    import torch

    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise MissingError(f"--device {name}: torch cannot use it here ({str(error).splitlines()[0]})") from None
    return device
