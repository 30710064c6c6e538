"""The commands about models: what is registered, who is champion, what a model says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, StoreRoot, open_chosen, out, print_json


def models(as_json: AsJson = False) -> None:
    """List the registered models: every version, its aliases, the run it came from, its figures on held-out text.

    Example: holdfast models
    """
    from holdfast.components.runtime.environment import mlflow_is_there
    from holdfast.components.tracking import registered
    from holdfast.pipelines.view.report import print_models

    found = registered() if mlflow_is_there() else ()  # a look at an MLflow makes none
    if as_json:
        print_json([{**asdict(version), "aliases": list(aliases)} for version, aliases in found])
        return
    print_models(found)


def promote(
    version: Annotated[
        str, typer.Argument(metavar="MODEL/VERSION", help="A registered model and its version.", show_default=False)
    ],
) -> None:
    """Make a version of a registered model its champion, the one that is served and that new models must beat.

    Example: holdfast promote quickstart/3
    """
    from holdfast.components.tracking import promote as promoted

    model, slash, number = version.rpartition("/")
    if not slash or not model or not number.isdecimal():
        raise typer.BadParameter(f"{version!r} is not MODEL/VERSION, such as quickstart/3")
    champion = promoted(model, int(number))
    out(f"{model}@champion is version {champion.version}")


def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A registered model.", show_default=False)],
) -> None:
    """Make the champion before the present one champion again.

    Example: holdfast rollback quickstart
    """
    from holdfast.components.tracking import rollback as rolled_back

    out(f"{model}@champion is version {rolled_back(model).version}")


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Open MLflow's UI on the runs and models of this machine. End it with Ctrl-C.

    Example: holdfast ui --port 0
    """
    from holdfast.pipelines.view.ui import serve

    raise typer.Exit(serve(host, port))


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a registered model (name, name@alias, name/version) or a folder.", show_default=False
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="What the text begins with.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    store: StoreRoot = "",
) -> None:
    """Let a model go on with a prompt.

    Example: holdfast generate quickstart@champion "def main("
    """
    from holdfast.pipelines.view.models import locate

    folder = locate(model, open_chosen(store))
    from holdfast.components.model.generate import generate as continued
    from holdfast.components.model.hugging_face import load_exported

    decoder, tokenizer = load_exported(folder)
    out(prompt + continued(decoder, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed))
