"""The command `holdfast`: what a person types, and the exit codes that a script reads.

Promises a quick start (nothing heavy is imported before a command needs it), errors without a traceback, and the code
of the table for each of them. Leaves the work to the modules it calls.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.spec.errors import ExitCode, HoldfastError
from pipelines.trigger import trigger

if TYPE_CHECKING:
    from components.store import Store

EPILOG = """
Exit codes: 0 done; 1 a bug; 2 wrong command line; 3 the model was not blessed; 10-17 permanent (10 bad spec, 11 bad
data, 12 diverged, 15 not found, 16 access denied); 128 and above: the same command may succeed (130 and 143
interrupted, 204 interrupted with a checkpoint saved, 203 store unreachable, 205 no space).
"""

app = typer.Typer(
    help="LLM training runs that survive anything: one file in, a registered model out.\n\n"
    "Try it:  [bold]holdfast run examples/quickstart.yaml[/bold]",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a field, such as training.steps=50. Repeat it for more.",
        show_default=False,
    ),
]  # fmt: skip
StoreRoot = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="file:///path, s3://bucket/prefix or a folder. Default: the spec's, "
        "HOLDFAST_STORE, or a folder under HOLDFAST_HOME.", show_default=False,
    ),
]  # fmt: skip
Salt = Annotated[str, typer.Option(help="Go on with the run that --fresh started under this salt.", show_default=False)]


@app.command()
def validate(spec: SpecFile, overrides: Overrides = None) -> None:
    """Check a spec and say everything that is wrong with it.

    Example: holdfast validate examples/quickstart.yaml --set training.steps=50
    """
    from components.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    _out(f"{spec}: fine ({checked.name}, {checked.training.steps} steps, {checked.world_size} processes)")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the spec, for editors that complete and check it.

    Example: holdfast schema > spec.schema.json, then in the first line of a spec:
    # yaml-language-server: $schema=spec.schema.json
    """
    from components.spec.schema import json_schema

    _out(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command(name="compile")
def compile_(
    spec: SpecFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the pipeline.")] = Path(
        "pipeline.yaml"
    ),
    image: Annotated[str, typer.Option(help="Image of every step.", show_default=False)] = "",
    overrides: Overrides = None,
) -> None:
    """Write the pipeline of a spec for Kubeflow. The spec and overrides are parameters that its UI shows.

    Example: holdfast compile examples/quickstart.yaml -o pipeline.yaml
    """
    from components.spec.load import load_spec
    from pipelines.compile import compile_pipeline

    compile_pipeline(load_spec(spec, overrides or ()), output, image or None)
    _out(f"{output}: written")


@app.command()
def run(
    spec: SpecFile,
    overrides: Overrides = None,
    store: StoreRoot = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, whatever was done before. Deletes nothing.")
    ] = False,
    salt: Salt = "",
) -> None:
    """Run a spec on this machine, from raw text to a registered model.

    The same command again goes on where it was, or answers at once when the work is done.

    Example: holdfast run examples/quickstart.yaml --set training.steps=50
    """
    from pipelines.run import run_locally

    if fresh and salt:
        raise typer.BadParameter("--fresh draws a new salt; give one of --fresh and --salt")
    again = shlex.join(["holdfast", *_without_salt(sys.argv[1:])])
    code = run_locally(spec, overrides or (), store=store, fresh=fresh, salt=salt, again=again)
    raise typer.Exit(int(code))


@app.command(name="id")
def identity(spec: SpecFile, overrides: Overrides = None, salt: Salt = "") -> None:
    """Print the dataset id and the run id of a spec, without running anything.

    Example: holdfast id examples/quickstart.yaml
    """
    from pipelines.run import plan

    made = plan(spec, overrides or (), salt=salt)
    _out(f"dataset {made.dataset_id}\nrun     {made.run_id}")


@app.command()
def runs(store: StoreRoot = "") -> None:
    """List the runs in the store, newest first.

    Example: holdfast runs --store s3://bucket/prefix
    """
    from pipelines.catalog import all_runs
    from pipelines.report import print_runs

    opened = _open(store)
    print_runs(all_runs(opened), opened.url)


@app.command()
def show(
    wanted: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, its beginning, or a name.", show_default=False)
    ],
    store: StoreRoot = "",
) -> None:
    """Show one run: its state, figures, verdict, spec, and where everything is.

    Example: holdfast show 3f2a
    """
    from pipelines.catalog import find_run
    from pipelines.report import print_run

    opened = _open(store)
    print_run(find_run(opened, wanted), opened)


@app.command()
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
    from pipelines.models import locate

    folder = locate(model, _open(store))
    from components.model.generate import generate as continued
    from components.model.hugging_face import load_exported

    decoder, tokenizer = load_exported(folder)
    _out(prompt + continued(decoder, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed))


app.command()(trigger)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Open MLflow's UI on the runs and models of this machine. End it with Ctrl-C.

    Example: holdfast ui --port 0
    """
    from pipelines.ui import serve

    raise typer.Exit(serve(host, port))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    _out(f"holdfast {installed('holdfast')}")


def main() -> None:
    """The console command."""
    try:
        app()
    except HoldfastError as error:
        _err(f"error: {error}")
        sys.exit(int(error.exit_code))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the output has enough
        sys.exit(int(ExitCode.OK))
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
    except Exception as error:  # noqa: BLE001 - the last resort of a command
        _err(f"error: unexpected failure: {type(error).__name__}: {error}\nplease report it with {_crash_report()}")
        sys.exit(int(ExitCode.UNEXPECTED))


def _open(store: str) -> Store:
    from components.spec.environment import store_url
    from components.store import open_store
    from pipelines.anchor import store_root

    return open_store(store_root(store) if store else store_url())


def _without_salt(arguments: list[str]) -> list[str]:
    """The command line without --fresh and --salt, which the advice on how to go on adds itself."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument == "--fresh" or argument.startswith("--salt="):
            skip = False
        elif argument == "--salt":
            skip = True
        else:
            kept.append(argument)
    return kept


def _crash_report() -> Path:
    from components.spec.environment import home

    path = home() / "logs" / f"crash-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(traceback.format_exc(), encoding="utf-8")
    return path


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")


def _err(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
