"""Commands that only Kubeflow has: `upload` and `schedule`.

Heavy imports happen when a command runs. The environment sets the server and the credentials: see docs/kubeflow.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.api import ClusterOptions
from holdfast.pipelines.cli.options import (
    AsJson,
    DryRun,
    Endpoint,
    Image,
    Namespace,
    Overrides,
    ServiceAccount,
    SpecOptions,
    err,
    out,
    print_json,
    print_yaml,
)
from holdfast.spec.errors import ExitCode

if TYPE_CHECKING:
    from holdfast.pipelines.backends.kubeflow.connection import Server

Store = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="URL",
        help="Root of the store: s3://bucket/prefix. Default: `store` of the spec, else HOLDFAST_STORE of the pods.",
        show_default=False,
    ),
]


def upload(
    spec: SpecOptions,
    image: Image = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Upload the pipeline of a spec to the KFP server. Starts no run.

    New content becomes a new version; the same content is never uploaded twice. Prints the version and its link.

    Example: holdfast upload examples/cluster-cpu.yaml --endpoint http://localhost:8888
    """
    from holdfast.api.specs import connect
    from holdfast.api.specs import upload as uploaded

    checked_spec = spec.load()
    server = connect(ClusterOptions(endpoint=endpoint, namespace=namespace), dry_run=dry_run)
    version = uploaded(checked_spec, server, image)
    if _shown(server, as_json):
        return
    link = server.link("pipelines", f"{version.pipeline_id}/version/{version.version_id}")
    if as_json:
        print_json({"pipeline": checked_spec.name, **asdict(version), "link": link})
        return
    out(f"{checked_spec.name} {version.version}: {'uploaded' if version.created else 'exists already'}\n  {link}")


def schedule(
    spec: Annotated[
        Path | None, typer.Argument(metavar="SPEC", help="The spec: a YAML file. Not with --list.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    list_: Annotated[bool, typer.Option("--list", help="Print all schedules, and change nothing.")] = False,
    pause: Annotated[bool, typer.Option("--pause", help="Start no run until a call without --pause.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the schedule. Active runs continue.")] = False,
    store: Store = "",
    image: Image = "",
    service_account: ServiceAccount = "",
    controller_timezone: Annotated[
        str, typer.Option(help="Time zone of KFP's scheduler: its CRON_SCHEDULE_TIMEZONE.")
    ] = "UTC",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a spec periodically on Kubeflow, as its section `schedule` sets.

    Creates the schedule, or replaces it if the spec has changed. Prints its times and its link. Changing a schedule
    never ends a run.

    Example: holdfast schedule examples/cluster-cpu.yaml --set schedule.cron='0 3 * * 1'
    """
    from holdfast.api import specs

    if sum((list_, pause, delete)) > 1 or list_ == (spec is not None):
        raise typer.BadParameter("use SPEC alone, SPEC with either --pause or --delete, or --list alone")
    options = ClusterOptions(image, service_account, endpoint, namespace)
    if spec is None:
        _list(specs.connect(options), as_json)
        return
    checked_spec = SpecOptions(spec, overrides).load()
    if pause or delete:
        server = specs.connect(options, dry_run=dry_run)
        paused = specs.pause_schedule(checked_spec, server) if pause else []
        removed, active = specs.delete_schedule(checked_spec, server) if delete else ((), ())
        if _shown(server, as_json):
            return
        if as_json:
            print_json({"pipeline": checked_spec.name, "paused": paused, "removed": removed, "kept": active})
        else:
            out(
                f"{checked_spec.name}: {'paused' if paused else 'paused already'}"
                if pause
                else f"{checked_spec.name}: deleted"
            )
            _say_former(removed if pause else (), active)
        return
    server = specs.connect(options, dry_run=dry_run)
    scheduled = specs.schedule(checked_spec, server, store=store, options=options, timezone=controller_timezone)
    if _shown(server, as_json):
        return
    if as_json:
        print_json(scheduled)
    else:
        out(
            f"{checked_spec.name}: {scheduled.when}{'' if scheduled.created else ' (exists already)'}\n"
            f"  {scheduled.link}"
        )
        _say_former(scheduled.removed, scheduled.kept)


def _shown(server: Server, as_json: bool) -> bool:
    """Whether this is a dry run. Its requests are then printed."""
    if not server.dry:
        return False
    if server.offline:
        err("no KFP server is configured: these are the requests to an empty server")
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
        out(f"  {len(kept)} former stay disabled until their runs have ended; the next call removes them")


def _list(server: Server, as_json: bool) -> None:
    from holdfast.api.specs import schedules

    entries = schedules(server)
    if as_json:
        print_json(entries)
        return
    if not entries:
        out(f"no schedules on {server.host}; create one with `holdfast schedule SPEC`")
        raise typer.Exit(int(ExitCode.OK))
    for entry in entries:
        state = "enabled" if entry.enabled else "paused"
        running = f", {entry.running} running" if entry.running else ""
        out(f"{entry.pipeline:<24}  {state:<8}  {entry.when}{running}\n  {entry.recurring_run_id}")
