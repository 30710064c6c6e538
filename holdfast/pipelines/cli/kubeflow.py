"""The commands that only Kubeflow has: `upload` and `schedule`.

Nothing heavy is imported before a command runs. Where and as whom is the environment's: see docs/kubeflow.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import (
    AsJson,
    DryRun,
    Endpoint,
    Image,
    Namespace,
    Overrides,
    ServiceAccount,
    SpecFile,
    err,
    out,
    print_json,
    print_yaml,
)
from holdfast.spec.errors import ExitCode

if TYPE_CHECKING:
    from holdfast.pipelines.backends.kubeflow.connection import Server
    from holdfast.spec import Spec

Store = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="Root of the store, s3://bucket/prefix. Default: the spec's, else "
        "HOLDFAST_STORE of the pods.", show_default=False,
    ),
]  # fmt: skip


def upload(
    spec: SpecFile,
    overrides: Overrides = None,
    image: Image = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Put the pipeline of a spec on the KFP server: a new version if its content is new.

    Example: holdfast upload examples/cluster-cpu.yaml --endpoint http://localhost:8888
    """
    from holdfast.pipelines.backends.kubeflow.upload import upload as uploaded

    checked = _spec(spec, overrides)
    server = _connect(endpoint, namespace, dry_run)
    made = uploaded(server, checked, image or None)
    if _shown(server, as_json):
        return
    link = server.link("pipelines", f"{made.pipeline_id}/version/{made.version_id}")
    if as_json:
        print_json({"pipeline": checked.name, **asdict(made), "link": link})
        return
    out(f"{checked.name} {made.version}: {'uploaded' if made.created else 'is there already'}\n  {link}")


def schedule(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="The spec file; not for --list.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    list_: Annotated[bool, typer.Option("--list", help="Show all schedules, and change nothing.")] = False,
    pause: Annotated[bool, typer.Option("--pause", help="Start nothing more until this is called without it.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it. What is running goes on.")] = False,
    store: Store = "",
    image: Image = "",
    service_account: ServiceAccount = "",
    controller_timezone: Annotated[
        str, typer.Option(help="Time zone that KFP's scheduler counts in: its CRON_SCHEDULE_TIMEZONE.")
    ] = "UTC",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a spec on Kubeflow again and again, as its `schedule` says. Changing it never ends a run.

    Example: holdfast schedule examples/cluster-cpu.yaml --set schedule.cron='0 3 * * 1'
    """
    from holdfast.pipelines.backends.kubeflow import schedule as schedules
    from holdfast.pipelines.backends.request import build_request

    if sum((list_, pause, delete)) > 1 or list_ == (spec is not None):
        raise typer.BadParameter("give a SPEC, alone or with one of --pause and --delete; or --list alone")
    if spec is None:
        _list(_connect(endpoint, namespace), as_json)
        return
    checked = _spec(spec, overrides)
    if pause or delete:
        server = _connect(endpoint, namespace, dry_run)
        paused = schedules.pause(server, checked.name) if pause else []
        removed, kept = schedules.delete(server, checked.name) if delete else ((), ())
        if _shown(server, as_json):
            return
        if as_json:
            print_json({"pipeline": checked.name, "paused": paused, "removed": removed, "kept": kept})
        else:
            out(
                f"{checked.name}: {'paused' if paused else 'is paused already'}"
                if pause
                else f"{checked.name}: deleted"
            )
            _say_former(removed if pause else (), kept)
        return
    schedules.trigger_of(
        checked, controller_timezone
    )  # a schedule that KFP cannot keep is refused before anything else
    wanted = build_request(checked, store=store, service_account=service_account, image=image)
    server = _connect(endpoint, namespace, dry_run)
    made = schedules.schedule(server, wanted, controller_timezone=controller_timezone)
    if _shown(server, as_json):
        return
    if as_json:
        print_json(made)
    else:
        out(f"{checked.name}: {made.when}{'' if made.created else ' (was there already)'}\n  {made.link}")
        _say_former(made.removed, made.kept)


def _spec(path: Path, overrides: Sequence[str] | None) -> Spec:
    from holdfast.spec.load import load_spec

    return load_spec(path, overrides or ())


def _connect(endpoint: str, namespace: str, dry_run: bool = False) -> Server:
    from holdfast.pipelines.backends.kubeflow.connection import Access, Server

    return Server(Access.from_environment(endpoint, namespace), dry=dry_run)


def _shown(server: Server, as_json: bool) -> bool:
    """Whether this was a dry run, whose requests are then printed."""
    if not server.dry:
        return False
    if server.offline:
        err("no Kubeflow Pipelines is known here: these are the requests to one that has nothing yet")
    if as_json:
        print_json(server.requests)
    elif server.requests:
        print_yaml(map(asdict, server.requests))
    else:
        out("# nothing would be changed")
    return True


def _say_former(removed: Sequence[str], kept: Sequence[str]) -> None:
    if removed:
        out(f"  removed {len(removed)} former schedule{'s' if len(removed) > 1 else ''}")
    if kept:
        out(f"  {len(kept)} former one stays, disabled, until its runs have ended; the next call removes it")


def _list(server: Server, as_json: bool) -> None:
    from holdfast.pipelines.backends.kubeflow.schedule import entries

    found = entries(server)
    if as_json:
        print_json(found)
        return
    if not found:
        out(f"no schedules on {server.host}; make one with `holdfast schedule SPEC`")
        raise typer.Exit(int(ExitCode.OK))
    for entry in found:
        state = "enabled" if entry.enabled else "paused"
        running = f", {entry.running} running" if entry.running else ""
        out(f"{entry.pipeline:<24}  {state:<8}  {entry.when}{running}\n  {entry.recurring_run_id}")
