"""The command `holdfast`: what a person types, and the exit codes that a script reads.

Promises a quick start (nothing heavy is imported before a command needs it), errors without a traceback, and the code
of the table for each of them. Leaves the work to the modules it calls.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import time
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

from holdfast.components.spec.errors import ExitCode, HoldfastError
from holdfast.pipelines.cli import kubeflow
from holdfast.pipelines.cli.options import Fresh, Image, Overrides, Salt, SpecFile, StoreRoot
from holdfast.pipelines.cli.options import err as _err
from holdfast.pipelines.cli.options import out as _out
from holdfast.pipelines.cli.simulate import simulate
from holdfast.pipelines.cli.trigger import trigger

if TYPE_CHECKING:
    from holdfast.components.spec import Spec
    from holdfast.components.store import Store

EPILOG = """
Exit codes: 0 done; 1 a bug; 2 wrong command line; 3 the model was not blessed; 4 not due; 10-17 permanent (10 bad spec,
11 bad data, 12 diverged, 15 not found, 16 access denied); 128 and above: the same command may succeed (130 and 143
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


@app.command()
def validate(spec: SpecFile, overrides: Overrides = None) -> None:
    """Check a spec and say everything that is wrong with it.

    Example: holdfast validate examples/quickstart.yaml --set training.steps=50
    """
    from holdfast.components.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    _out(f"{spec}: fine ({checked.name}, {checked.training.steps} steps, {checked.world_size} processes)")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the spec, for editors that complete and check it.

    Example: holdfast schema > spec.schema.json, then in the first line of a spec:
    # yaml-language-server: $schema=spec.schema.json
    """
    from holdfast.components.spec.schema import json_schema

    _out(json.dumps(json_schema(), indent=2, ensure_ascii=False))


class Target(StrEnum):
    """What a spec can be compiled to."""

    KFP = "kfp"
    ARGO = "argo"
    PYTORCHJOB = "pytorchjob"
    TRAINJOB = "trainjob"
    VOLCANO = "volcano"
    SLURM = "slurm"


@app.command(name="compile")
def compile_(
    spec: SpecFile,
    target: Annotated[
        Target, typer.Option(help="kfp and argo: the whole pipeline; the others: the training job alone.")
    ] = Target.KFP,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write it; - prints it.", show_default="pipeline.yaml for kfp, else -"
        ),
    ] = None,
    image: Image = "",
    overrides: Overrides = None,
) -> None:
    """Write the pipeline of a spec for Kubeflow, or what another system takes.

    The spec and overrides are parameters of the pipeline, which the UI of Kubeflow shows.

    Example: holdfast compile examples/quickstart.yaml -o pipeline.yaml
    """
    from holdfast.components.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    if image and target not in (Target.KFP, Target.ARGO):
        raise typer.BadParameter(f"--target {target} takes its image from cluster.image", param_hint="--image")
    text = _compiled(checked, target, image or None)
    output = output or Path("pipeline.yaml" if target is Target.KFP else "-")
    if str(output) == "-":
        _out(text.rstrip("\n"))
        return
    from holdfast.pipelines.backends.kubeflow.compile import write_whole

    write_whole(output, text)
    _out(f"{output}: written")


def _compiled(spec: Spec, target: Target, image: str | None) -> str:
    if target is Target.KFP:
        from holdfast.pipelines.backends.kubeflow.compile import pipeline_text

        return pipeline_text(spec, image)
    if target is Target.ARGO:
        from holdfast.pipelines.backends.argo import argo_text

        return argo_text(spec, image=image)
    from holdfast.components.launch import emitters

    return emitters.render(spec, cast("emitters.Target", target.value))


@app.command()
def run(
    spec: SpecFile,
    overrides: Overrides = None,
    store: StoreRoot = "",
    fresh: Fresh = False,
    salt: Salt = "",
) -> None:
    """Run a spec on this machine, from raw text to a registered model.

    The same command again goes on where it was, or answers at once when the work is done.

    Example: holdfast run examples/quickstart.yaml --set training.steps=50
    """
    from holdfast.pipelines.backends.local.run import run_locally

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
    from holdfast.pipelines.backends.local.run import plan

    made = plan(spec, overrides or (), salt=salt)
    _out(f"dataset {made.dataset_id}\nrun     {made.run_id}")


@app.command()
def runs(store: StoreRoot = "") -> None:
    """List the runs in the store, newest first.

    Example: holdfast runs --store s3://bucket/prefix
    """
    from holdfast.pipelines.view.catalog import all_runs
    from holdfast.pipelines.view.report import print_runs

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
    from holdfast.pipelines.view.catalog import find_run
    from holdfast.pipelines.view.report import print_run

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
    from holdfast.pipelines.view.models import locate

    folder = locate(model, _open(store))
    from holdfast.components.model.generate import generate as continued
    from holdfast.components.model.hugging_face import load_exported

    decoder, tokenizer = load_exported(folder)
    _out(prompt + continued(decoder, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed))


app.command()(trigger)
app.command()(simulate)


@app.command()
def models() -> None:
    """List the registered models: every version, its aliases, the run it came from, its figures on held-out text.

    Example: holdfast models
    """
    from holdfast.components.runtime.environment import mlflow_is_there
    from holdfast.components.tracking import registered
    from holdfast.pipelines.view.report import print_models

    print_models(registered() if mlflow_is_there() else ())  # a look at an MLflow makes none


@app.command()
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
    _out(f"{model}@champion is version {champion.version}")


@app.command()
def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A registered model.", show_default=False)],
) -> None:
    """Make the champion before the present one champion again.

    Example: holdfast rollback quickstart
    """
    from holdfast.components.tracking import rollback as rolled_back

    _out(f"{model}@champion is version {rolled_back(model).version}")


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 5000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Open MLflow's UI on the runs and models of this machine. End it with Ctrl-C.

    Example: holdfast ui --port 0
    """
    from holdfast.pipelines.view.ui import serve

    raise typer.Exit(serve(host, port))


@app.command()
def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="Check for what this spec asks for.", show_default=False)
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Default: the spec's, else the current one.", show_default=False)
    ] = "",
    store: StoreRoot = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Check a cluster, the store and MLflow for what a run would miss, and say how to mend it.

    Example: holdfast doctor examples/gpu.yaml --namespace holdfast
    """
    from holdfast.components.spec.load import load_spec
    from holdfast.pipelines import doctor

    findings = list(doctor.examine(load_spec(spec, overrides or ()) if spec else None, namespace, store))
    _out(json.dumps(doctor.as_json(findings), indent=2) if as_json else doctor.print_findings(findings))
    raise typer.Exit(int(doctor.exit_code(findings)))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    _out(f"holdfast {installed('holdfast')}")


kubeflow.add_to(app)


def main() -> None:
    """The console command."""
    try:
        app()
    except HoldfastError as error:
        _err(f"error: {error}")
        sys.exit(int(error.exit_code))
    except BrokenPipeError:
        _leave(ExitCode.OK)  # whoever read the output has enough
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
    except Exception as error:  # noqa: BLE001 - the last resort of a command
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _err(f"error: {error}; free some space, then run the same command again")
            _leave(ExitCode.NO_SPACE)
        _err(f"error: unexpected failure: {type(error).__name__}: {error}\nplease report it with {_crash_report()}")
        sys.exit(int(ExitCode.UNEXPECTED))


def _open(store: str) -> Store:
    from holdfast.components.runtime.environment import store_url
    from holdfast.components.store import open_store
    from holdfast.pipelines.paths import store_root

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


def _leave(code: ExitCode) -> NoReturn:
    """End with `code` although standard output takes nothing any more: what is left of the output is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(int(code))


def _crash_report() -> str:
    """The file with the traceback; the traceback itself where no file can be written."""
    from holdfast.components.runtime.environment import home

    told = traceback.format_exc()
    path = home() / "logs" / f"crash-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(told, encoding="utf-8")
    except OSError as error:
        return f"this ({path.parent} cannot be written: {error.strerror}):\n{told}"
    return str(path)
