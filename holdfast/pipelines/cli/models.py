"""The commands about models: what is registered, who is champion, what a model says."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import (
    AsJson,
    DryRun,
    Overrides,
    SpecFile,
    StoreRoot,
    err,
    open_chosen,
    out,
    print_json,
)
from holdfast.spec.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.serving import Published
    from holdfast.store import Store
    from holdfast.tracking import Champion


def models(store: StoreRoot = "", as_json: AsJson = False) -> None:
    """List the registered models: every version, its aliases, the run it came from, its figures on held-out text.

    A version that the store has not registered is shown as foreign, with the reason, and never used.

    Example: holdfast models
    """
    from holdfast.pipelines.view.report import print_models
    from holdfast.runtime.environment import mlflow_is_there
    from holdfast.tracking import registered

    found = registered(open_chosen(store)) if mlflow_is_there() else ()  # a look at an MLflow makes none
    if as_json:
        print_json([{**asdict(version), "aliases": list(aliases)} for version, aliases in found])
        return
    print_models(found)


def promote(
    version: Annotated[
        str, typer.Argument(metavar="MODEL/VERSION", help="A registered model and its version.", show_default=False)
    ],
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Make a version of a registered model its champion, the one that is served and that new models must beat.

    Example: holdfast promote quickstart/3
    """
    from holdfast.tracking import promote as promoted

    model, slash, number = version.rpartition("/")
    if not slash or not model or not number.isdecimal():
        raise typer.BadParameter(f"{version!r} is not MODEL/VERSION, such as quickstart/3")
    opened = open_chosen(store)
    champion = promoted(model, int(number), opened)
    _follow(champion, opened, as_json)


def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A registered model.", show_default=False)],
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Make the champion before the present one champion again.

    Example: holdfast rollback quickstart
    """
    from holdfast.tracking import rollback as rolled_back

    opened = open_chosen(store)
    champion = rolled_back(model, opened)
    _follow(champion, opened, as_json)


def serve(
    spec: SpecFile,
    overrides: Overrides = None,
    store: StoreRoot = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Do for the champion what the spec's `serving` says: serve it with KServe, enter it in the Model Registry.

    Fine to repeat. Registering, promoting and rolling back do it by themselves.

    Example: holdfast serve examples/cluster-cpu.yaml --set serving.kserve.namespace=models
    """
    from holdfast.pipelines.cli.options import print_yaml
    from holdfast.runtime.secrets import redact
    from holdfast.serving import inference_service_of, publish
    from holdfast.spec.errors import MissingError
    from holdfast.spec.load import load_spec
    from holdfast.tracking import champion, trusted_stores

    checked = load_spec(spec, overrides or ())
    opened = open_chosen(store or checked.store or "")
    found = champion(checked.registered_model, trusted_stores(checked, opened))
    if found is None:
        raise MissingError(f"registered model {checked.registered_model!r} has no champion: register or promote one")
    serving = checked.serving
    if serving.kserve is None and serving.model_registry is None:
        err("note: nothing to do: the spec's `serving` has neither kserve nor model_registry; see docs/serving.md")
    if dry_run:
        if serving.model_registry is not None:
            where = redact(serving.model_registry.url)
            err(f"note: version {found.version} of {found.model} would be entered in {where}")
        if serving.kserve is not None:
            print_yaml([inference_service_of(checked, found)])
        return
    published = publish(checked, found, champion=True)
    if as_json:
        print_json({"champion": found, "published": published})
    else:
        _say(published)


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
    as_json: AsJson = False,
) -> None:
    """Let a model go on with a prompt.

    Example: holdfast generate quickstart@champion "def main("
    """
    from holdfast.pipelines.view.models import locate

    files = locate(model, open_chosen(store))
    from holdfast.model.generate import generate as continued
    from holdfast.model.hugging_face import load_exported

    decoder, tokenizer = load_exported(files)
    text = continued(decoder, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        print_json({"prompt": prompt, "text": text})
    else:
        out(prompt + text)


def _follow(champion: Champion, store: Store, as_json: bool) -> None:
    """Tell of the new champion, and let what serves the model serve it. That the alias has moved stands, whatever comes
    of it."""
    from holdfast.serving import publish, settings_of

    try:
        if not as_json:
            out(f"{champion.model}@champion is version {champion.version}")
        settings = settings_of(champion.model, store)
        published = publish(settings, champion, champion=True) if settings is not None else None
        if as_json:
            print_json({"champion": champion, "published": published})
        elif published is not None:
            _say(published)
    except HoldfastError as error:
        if as_json:
            print_json({"champion": champion, "published": None, "not_served": str(error)})
        err(f"error: version {champion.version} is the champion, and is not served yet: {error}\nwhen that is mended: "
            "holdfast serve SPEC")  # fmt: skip
        raise typer.Exit(int(error.exit_code)) from None


def _say(published: Published) -> None:
    if published.service:
        out(f"InferenceService {published.service} serves it")
    if published.entry:
        out(f"the Model Registry has it as model version {published.entry}")
