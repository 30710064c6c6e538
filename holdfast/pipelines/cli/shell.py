"""`holdfast shell`: a shell, or another command, in the place of a rank."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from holdfast.api.rank_shell import rank_command
from holdfast.pipelines.cli.options import AsJson, BackendOptions, RunName, out, print_json
from holdfast.spec.errors import MissingError


def shell(
    run: RunName,
    where: BackendOptions,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND", help="What to run there. Default: a shell.", show_default=False),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank.")] = 0,
    print_only: Annotated[bool, typer.Option("--print", help="Print the command line, and run nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open a shell where a rank of a running run is, or run a command there. See docs/logs.md.

    It is in the working folder of the rank, with its environment. The exit code is that of the command. With --json or
    --print, the command line is printed instead.

    Example: holdfast shell 3f2a --rank 1 -- nvidia-smi
    """
    found = rank_command(run, rank, command or (), at=where.location, terminal=sys.stdin.isatty())
    if as_json:
        print_json(asdict(found))
    elif print_only:
        out(shlex.join(found.argv))
    else:
        _become(found.argv)


def _become(argv: tuple[str, ...]) -> None:
    """Replace this process, so that the terminal, signals and the exit code are those of the command."""
    from holdfast.launch.slurm import without_job

    program = shutil.which(argv[0])
    if program is None:
        raise MissingError(f"{argv[0]}: is not installed on this machine, and reaches the node; install it")
    sys.stdout.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    os.execve(program, argv, without_job(os.environ))  # noqa: S606 - the person's own command
