"""Commands about models: registered versions, the champion, and generated text."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.inference import print_published
from holdfast.pipelines.cli.options import (
    AsJson,
    StoreRoot,
    err,
    out,
    print_json,
)

if TYPE_CHECKING:
    from holdfast.api.models import NewChampion

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, promote, roll back and try registered models.",
)


@app.command("list")
def list_(store: StoreRoot = "", as_json: AsJson = False) -> None:
    """List the registered models: every version, with its aliases, run, and metrics on held-out text.

    A version that this store has not registered is listed as foreign, with the reason. It is never used.

    Example: holdfast models list
    """
    from holdfast.api.models import models
    from holdfast.pipelines.view.report import print_models

    versions = models(store)
    if as_json:
        print_json([{**asdict(version), "aliases": list(aliases)} for version, aliases in versions])
        return
    print_models(versions)


@app.command()
def promote(
    version: Annotated[
        str, typer.Argument(metavar="MODEL/VERSION", help="A registered model and its version.", show_default=False)
    ],
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Make a version of a registered model its champion.

    The champion is the version that is served, and that new models must beat. Prints the champion, and updates the
    systems that serve the model.

    Example: holdfast models promote quickstart/3
    """
    from holdfast.api.models import promote as promoted

    _print_champion(promoted(version, store), as_json)


@app.command()
def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A registered model.", show_default=False)],
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Restore the previous champion of a registered model.

    Prints the champion, and updates the systems that serve the model.

    Example: holdfast models rollback quickstart
    """
    from holdfast.api.models import rollback as rolled_back

    _print_champion(rolled_back(model, store), as_json)


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free port.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve MLflow's UI for the runs and models of this machine. Ctrl-C ends it.

    Prints its address, and the file with its password. If MLFLOW_TRACKING_URI names a server, it prints that address
    and ends.

    Example: holdfast ui --port 0
    """
    from holdfast.pipelines.view.ui import serve

    raise typer.Exit(serve(host, port))


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a registered model (name, name@alias, name/version) or a folder.", show_default=False
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="Beginning of the text.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Generate text with a model.

    Prints the prompt and its continuation.

    Example: holdfast models generate quickstart@champion "def main("
    """
    from holdfast.api.models import generate as continued

    text = continued(model, prompt, tokens=tokens, temperature=temperature, seed=seed, store=store)
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        out(prompt + text)


def _print_champion(made: NewChampion, as_json: bool) -> None:
    """Print the new champion and what serves it. Ends with the code of the error if it is not served."""
    champion, error = made.champion, made.not_served
    if as_json:
        failed = {} if error is None else {"not_served": str(error)}
        print_json({"champion": champion, "published": made.published, **failed})
    else:
        out(f"{champion.model}@champion is version {champion.version}")
        if made.published is not None:
            print_published(made.published)
    if error is not None:
        err(
            f"error: version {champion.version} is the champion, and is not served yet: {error}\nwhen that is fixed: "
            "holdfast serve SPEC"
        )
        raise typer.Exit(int(error.exit_code))
