"""The command `holdfast`: its subcommands, and their exit codes.

The start is quick: heavy imports happen only in the command that needs them. Each error has an exit code of the table
and no traceback. The modules that it calls do the work.
"""

import errno
import inspect
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer

from holdfast.pipelines.cli import (
    audit,
    checkpoints,
    inference,
    kubeflow,
    machines,
    models,
    monitoring,
    run,
    runs,
    show,
    specs,
)
from holdfast.pipelines.cli.chaos import chaos
from holdfast.pipelines.cli.data import data
from holdfast.pipelines.cli.options import err, out, print_json, with_options
from holdfast.pipelines.cli.plan import plan
from holdfast.pipelines.cli.simulate import simulate
from holdfast.runtime.environment import give_home, home, make_folder
from holdfast.runtime.exits import explained
from holdfast.runtime.output import ReaderGoneError, outlive_reader, prepare_streams, watch_reader
from holdfast.runtime.secrets import redact
from holdfast.spec.errors import ExitCode, HoldfastError, SpecError

EPILOG = (
    "Exit codes: 0 done; 1 a bug; 2 wrong command line; 3 the model is not blessed; 4 no retraining is due; 5 trials"
    " of a sweep failed; 6 the bits differ; 7 the champion changed: run the same command again; 10-22 permanent (10"
    " bad spec, 11 bad data, 12 diverged, 13 no checkpoint is intact, 15 not found, 16 access denied, 20 out of"
    " memory); 128 and above: the same command may succeed (130 and 143 interrupted, 204 interrupted with a checkpoint"
    " saved, 203 store unreachable, 205 no space)."
)

app = typer.Typer(
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        out(f"holdfast {machines.installed()}")
        raise typer.Exit


@app.callback()
def holdfast(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """LLM training pipelines that resume bit for bit after a failure: one spec file in, a registered model out.

    Try it:  [bold]holdfast run examples/quickstart.yaml[/bold]
    """


PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Runs on any backend": {
        "run": run.run,
        "sweep": run.sweep,
        "resume": run.resume,
        "show": show.show,
        "watch": monitoring.watch,
        "logs": runs.logs,
        "shell": monitoring.shell,
        "stop": runs.stop,
        "fork": audit.fork,
        "rollouts": show.rollouts,
        "report": monitoring.report,
        "profile": monitoring.profile,
    },
    "Specs": {
        "init": specs.init,
        "validate": specs.validate,
        "data": data,
        "verify": specs.verify,
        "compile": specs.compile_,
        "plan": plan,
        "trigger": specs.trigger,
    },
    "Models": {"chat": inference.chat, "serve": inference.serve, "ui": models.ui},
    "Kubeflow": {"upload": kubeflow.upload, "schedule": kubeflow.schedule},
    "Clusters and this machine": {
        "doctor": machines.doctor,
        "health": machines.health,
        "chaos": chaos,
        "calibrate": machines.calibrate,
        "simulate": simulate,
    },
}
GROUPS: dict[str, tuple[str, typer.Typer]] = {
    "runs": ("Runs on any backend", runs.app),
    "checkpoints": ("Runs on any backend", checkpoints.app),
    "audit": ("Runs on any backend", audit.app),
    "models": ("Models", models.app),
}
for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
for name, (panel, group) in GROUPS.items():
    app.add_typer(group, name=name, rich_help_panel=panel)


def _flowing(text: str) -> str:
    """The docstring with each paragraph on one line, so that the terminal decides the line breaks.

    Indented lines stay. Without this, the help would keep the line breaks of the source.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(re.sub(r"\n(?! )", " ", paragraph) for paragraph in paragraphs)


for each in [one for some in (app, *(group for _, group in GROUPS.values())) for one in some.registered_commands]:
    assert each.callback is not None, each.name
    each.help = _flowing(each.callback.__doc__ or "")
    each.callback = with_options(each.callback)


def main() -> None:
    """The console command. With `--json`, standard output is one JSON document, also after a failure."""
    prepare_streams()
    watch_reader()
    give_home()
    as_json = "--json" in takewhile(lambda word: word != "--", sys.argv[1:])
    try:
        try:
            if not as_json:
                app()
            code = app(standalone_mode=False)  # a wrong command line raises, too
            sys.exit(code if isinstance(code, int) else int(ExitCode.OK))
        finally:  # at the interpreter's end, a closed pipe would count as a failure
            sys.stdout.flush()
    except HoldfastError as error:
        _refuse(error, as_json)
    except ReaderGoneError:
        sys.exit(int(ExitCode.OK))  # the reader of the output has closed the pipe
    except KeyboardInterrupt:
        sys.exit(int(ExitCode.INTERRUPTED))
    except Exception as error:  # noqa: BLE001 - the last resort of a command
        if isinstance(known := explained(error), HoldfastError):
            _refuse(known, as_json)
        outlive_reader()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            err(f"error: {error}; free some space, then run the same command again")
            _leave(ExitCode.NO_SPACE)
        if as_json and getattr(error, "exit_code", None) == ExitCode.USAGE:
            print_json(_as_json(error, ExitCode.USAGE))
            sys.exit(int(ExitCode.USAGE))
        if as_json:
            print_json(_as_json(error, ExitCode.UNEXPECTED))
        err(f"error: unexpected failure: {type(error).__name__}: {error}\nplease report it with {_crash_report()}")
        sys.exit(int(ExitCode.UNEXPECTED))


def _refuse(error: HoldfastError, as_json: bool) -> NoReturn:
    """Print an error of Holdfast, and end with its code."""
    outlive_reader()
    if as_json:
        print_json(_as_json(error, error.exit_code))
    else:
        err(f"error: {error}")
    sys.exit(int(error.exit_code))


def _as_json(error: Exception, code: ExitCode) -> dict[str, Any]:
    """A failure as JSON: code, message, the field or option, and the remedy. A refused spec has all its problems."""
    problems = error.problems if isinstance(error, SpecError) else []
    first = problems[0] if problems else error
    hint = getattr(error, "param_hint", None)  # of a wrong command line
    return {
        "error": {
            "code": int(code),
            "name": code.name,
            "retryable": code.retryable,
            "message": redact(error.format_message() if hasattr(error, "format_message") else str(error)),
            "field": str(getattr(first, "field", "") or (hint if isinstance(hint, str) else "")),
            "remedy": redact(str(getattr(first, "remedy", ""))),
            "problems": [asdict(problem) for problem in problems],
        }
    }


def _leave(code: ExitCode) -> NoReturn:
    """End with `code` although standard output cannot be written. The rest of the output is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(int(code))


def _crash_report() -> str:
    """The path of a file with the traceback, or the traceback itself if no file can be written."""
    text = redact(traceback.format_exc())
    try:
        folder = home() / "logs"
    except HoldfastError as error:
        return f"this ({error}):\n{text}"
    path = folder / f"crash-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.log"
    try:
        make_folder(path.parent)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"this ({path.parent} cannot be written: {error.strerror}):\n{text}"
    return str(path)
