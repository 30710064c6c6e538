"""`holdfast chat` and `holdfast serve`: answers of a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, DryRun, Overrides, StoreRoot, err, out, print_json, print_yaml
from holdfast.runtime.output import without_controls
from holdfast.spec.errors import UsageError

if TYPE_CHECKING:
    from holdfast.inference.conversation import Conversation
    from holdfast.serving import Published

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, a registered model (name, name@alias, name/version) or a folder.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option(help="Such as cpu or cuda:1. Default: an accelerator if there is one.", show_default=False)
]


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are generated."""

    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 1024
    temperature: Annotated[
        float, typer.Option(min=0, max=10, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.7
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0
    device: Device = ""


def chat(
    model: Model,
    answers: AnswerOptions,
    message: Annotated[
        str | None,
        typer.Option("--message", "-m", help="Answer this message and end. `-` reads it from standard input."),
    ] = None,
    system: Annotated[str, typer.Option(help="The system message.", show_default=False)] = "",
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Talk to a model in the terminal. Answers appear as they are generated.

    The model's chat template writes the conversation. A model without one continues each text. If standard input is
    not a terminal, it is one message. Ctrl-C stops an answer; Ctrl-D ends.

    Example: holdfast chat quickstart@champion --system "Answer in one sentence."
    """
    from holdfast.api.inference import chat as begin

    if message == "-" or (message is None and not sys.stdin.isatty()):
        message = sys.stdin.read().rstrip("\n")
    if as_json and message is None:
        raise UsageError("needs one message", "--json", "add --message")
    conversation = begin(
        model,
        system=system,
        tokens=answers.tokens,
        temperature=answers.temperature,
        seed=answers.seed,
        device=answers.device,
        store=store,
    )
    try:
        if message is None:
            _talk(conversation)
        elif as_json:
            print_json({"message": message, "answer": "".join(conversation.reply(message))})
        else:
            _print_reply(conversation, message)
    finally:
        conversation.close()


def _talk(conversation: Conversation) -> None:
    """Answer lines of the terminal until they end."""
    from holdfast.inference.model import PromptError

    err(
        "The model has no chat template: it continues each text. Ctrl-D ends."
        if conversation.continues_text
        else "Write a message. Ctrl-C stops an answer, Ctrl-D ends."
    )
    while True:
        try:
            message = input("> ")
        except EOFError:
            out("")
            return
        if not message.strip():
            continue
        before = conversation.forgotten
        try:
            _print_reply(conversation, message)
        except KeyboardInterrupt:
            out("")
        except PromptError as error:
            err(f"error: {error}")
        if conversation.forgotten > before:
            err(f"note: the context is full; the {conversation.forgotten} oldest messages are forgotten")


def _print_reply(conversation: Conversation, message: str) -> None:
    parts = conversation.reply(message)
    try:
        for part in parts:
            sys.stdout.write(without_controls(part) if sys.stdout.isatty() else part)
            sys.stdout.flush()
    finally:
        parts.close()  # type: ignore[attr-defined] # a generator, whose answer ends here
    out("")


@dataclass(frozen=True)
class HereOptions:
    """How a model is served on this machine."""

    here: Annotated[
        bool, typer.Option("--here", help="Serve MODEL on this machine, with OpenAI's API. Ctrl-C ends it.")
    ] = False
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than the default needs HOLDFAST_API_KEY.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free port.")] = 8000
    name: Annotated[str, typer.Option(help="Name of the model for clients. Default: MODEL.", show_default=False)] = ""
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="A LoRA adapter, which clients select as the model NAME. Repeat it for more.",
            show_default=False,
        ),
    ] = None
    device: Device = ""
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Answers that are generated concurrently.")] = 8
    waiting: Annotated[int, typer.Option(min=0, max=10**6, help="Answers that may wait; more are refused.")] = 64
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens. Default: the context.", show_default=False)
    ] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for a request and its answer.")] = 600.0


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SPEC|MODEL",
            help="The spec of a champion; with --here: a run, a registered model or a folder.",
            show_default=False,
        ),
    ],
    options: HereOptions,
    overrides: Overrides = None,
    store: StoreRoot = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Serve a champion on a cluster as its spec sets, or with --here a model on this machine.

    SPEC: its section `serving` names the systems: KServe, a Deployment of vLLM, the Model Registry. Prints the objects
    that serve it. You can repeat it. Registration, `promote` and `rollback` do the same automatically.

    MODEL --here: an HTTP server with OpenAI's API, for any of its clients. Prints the address.

    Example: holdfast serve quickstart@champion --here --port 8000
    """
    if options.here:
        _serve_here(target, options, store)
        return
    from holdfast.api.models import serve as served
    from holdfast.pipelines.paths import load_spec

    checked_spec = load_spec(target, overrides or ())
    result = served(checked_spec, store=store, dry_run=dry_run)
    champion, serving = result.champion, checked_spec.serving
    if serving.kserve is None and serving.deployment is None and serving.model_registry is None:
        err("note: nothing to do: the spec's `serving` names no system; see docs/serving.md")
    if dry_run:
        if result.registry:
            err(f"note: version {champion.version} of {champion.model} would be entered in {result.registry}")
        if result.objects:
            print_yaml(result.objects)
    elif as_json:
        print_json({"champion": champion, "published": result.published})
    elif result.published is not None:
        print_published(result.published)


def print_published(published: Published) -> None:
    """Print what serves a champion."""
    if published.service:
        out(f"InferenceService {published.service} serves it")
    if published.deployment:
        out(f"Deployment {published.deployment} serves it")
    if published.entry:
        out(f"the Model Registry has it as model version {published.entry}")


def _serve_here(model: str, options: HereOptions, store: str) -> None:
    from holdfast.api.inference import ServerSettings, serve_here

    settings = ServerSettings(
        host=options.host,
        port=options.port,
        name=options.name,
        adapters=options.adapter or (),
        device=options.device,
        batch=options.batch,
        waiting=options.waiting,
        max_tokens=options.max_tokens,
        timeout=options.timeout,
    )

    def print_address(address: str) -> None:
        out(f"{options.name or model} is served at {address}; Ctrl-C ends it")
        sys.stdout.flush()

    serve_here(model, settings, store=store, ready=print_address)
