"""Commands for a run while it trains: `watch`, `report` and `profile`, and `shell` in the place of a rank."""

import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast import api
from holdfast.api.rank_shell import rank_command
from holdfast.pipelines.cli.options import (
    AsJson,
    BackendOptions,
    RunName,
    StoreRoot,
    open_chosen,
    out,
    print_json,
)
from holdfast.spec.errors import MissingError

WATCH_SECONDS = 2.0  # between two reads of the events
ASK_SECONDS = 10.0  # between two queries to the backend while the run does not train yet


def _backend_lines(run: str, store: str) -> tuple[list[str], bool]:
    """The reasons of the backend why a run does not train yet, and whether it has ended.

    Empty for a run of this machine, which reports that itself, and for a backend that cannot be reached.
    """
    from holdfast.spec.errors import HoldfastError

    try:
        backend, backend_id = api.find_backend(run, api.Location(store=store))
        status = None if backend.capabilities.foreground else backend.status(backend_id)
    except HoldfastError:
        return [], False
    if status is None:
        return [], False
    lines = [f"{step.name}: {step.state}  {step.error}" for step in status.steps if step.error]
    return [*lines, *([status.message] if status.message else [])], not status.unfinished


class Format(StrEnum):
    """Formats of a report."""

    HTML = "html"
    TENSORBOARD = "tensorboard"


def report(
    run: RunName,
    format_: Annotated[
        Format, typer.Option("--format", help="html: one page. tensorboard: an event file for TensorBoard.")
    ] = Format.HTML,
    follow: Annotated[bool, typer.Option("--follow", help="Rewrite the page until the training ends.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file of the page, or the folder of the event file. Default: under HOLDFAST_HOME.",
            show_default=False,
        ),
    ] = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Write a report of a training up to now: metrics, curves and the time of its ranks.

    The report is one HTML file. Prints its path, and that of the evaluation's report if it exists. With --follow, a
    browser that shows the file reloads it while the run trains; Ctrl-C ends only the rewriting. With --format
    tensorboard, it writes an event file with every step up to the newest checkpoint, the evaluation and the spec.

    Example: holdfast report 3f2a --follow
    """
    if format_ is Format.TENSORBOARD:
        if follow:
            raise typer.BadParameter("is only for --format html", param_hint="--follow")
        _write_event_file(run, output, store, as_json)
        return
    from holdfast.pipelines.view.catalog import find_run
    from holdfast.pipelines.view.page import TrainingPage
    from holdfast.pipelines.view.summary import report_place
    from holdfast.runtime.environment import home

    opened_store = open_chosen(store)
    record = find_run(opened_store, run)
    spec = record.known_spec(opened_store)
    page = TrainingPage(spec, record.run_id, opened_store, output or home() / "reports" / f"{record.run_id}.html")
    page.write(follow=follow)
    report_path = report_place(opened_store, record)
    if as_json:
        print_json({"run_id": record.run_id, "training": page.path, "evaluation": report_path})
    else:
        out(f"training: {page.path}")
        if report_path:
            out(f"evaluation: {report_path}")
    while follow and page.is_active:
        try:
            time.sleep(WATCH_SECONDS)
            page.write(follow=True)
        except KeyboardInterrupt:
            page.write(follow=False)  # the last page no longer reloads
            return


def _write_event_file(run: str, output: Path | None, store: str, as_json: bool) -> None:
    handle = api.Run(run, store)
    path = handle.write_tensorboard(output)
    if as_json:
        print_json({"run_id": handle.id, "file": path})
    else:
        out(f"{path}\nto view it: tensorboard --logdir {shlex.quote(str(path.parent.parent))}")


def profile(
    run: RunName,
    steps: Annotated[
        str, typer.Option(help="Steps to record: 100-110, or 10 for the next ten.", show_default=False)
    ] = "10",
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the trace, and print what took longest.")] = False,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Record where the time of some steps goes, with torch's profiler on rank 0.

    The run trains now, or will be resumed. No bit of it changes. `holdfast show` prints the path of the trace, which
    opens in https://ui.perfetto.dev.

    Example: holdfast profile 3f2a --steps 100-110
    """
    from holdfast.pipelines.view.profiles import print_operations
    from holdfast.pipelines.view.summary import place

    handle = api.Run(run, store)
    key = handle.profile(steps, wait=wait)
    if as_json:
        print_json({"run_id": handle.id, "steps": steps, "trace": key and place(handle.store, key)})
    elif key:
        out(f"trace: {place(handle.store, key)}")
        print_operations(handle.store, key)
    else:
        out(f"requested from run {handle.id}; `holdfast show {handle.id[:8]}` shows the trace once it is saved")


def watch(
    run: RunName,
    once: Annotated[bool, typer.Option("--once", help="Print the current state, and end.")] = False,
    store: StoreRoot = "",
) -> None:
    """Watch a run while it trains, on any backend: loss, speed, ranks, saves and events.

    The screen ends with the run. Ctrl-C ends only the screen.

    Example: holdfast watch 3f2a
    """
    from rich.live import Live

    from holdfast.pipelines.view.catalog import find_run
    from holdfast.pipelines.view.live import Screen
    from holdfast.pipelines.view.terminal import SafeConsole
    from holdfast.telemetry.event_log import StoreEvents

    opened_store, console = open_chosen(store), SafeConsole()
    record = find_run(opened_store, run)
    screen, events = Screen(record.name, record.run_id), StoreEvents(opened_store, record.run_id)
    screen.take(events.new())
    last_query, has_ended = time.monotonic(), False
    if not screen.trains:
        screen.backend_lines, has_ended = _backend_lines(run, store)
    if once or has_ended or screen.has_ended or not console.is_terminal:
        console.print(screen.draw(time.time(), console.width))
        return
    with Live(screen.draw(time.time(), *console.size), console=console, screen=True) as live:
        while not screen.has_ended and not has_ended:
            time.sleep(WATCH_SECONDS)
            screen.take(events.new())
            if not screen.trains and time.monotonic() - last_query > ASK_SECONDS:
                screen.backend_lines, has_ended = _backend_lines(run, store)
                last_query = time.monotonic()
            live.update(screen.draw(time.time(), *console.size))
    console.print(screen.draw(time.time(), console.width))


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
