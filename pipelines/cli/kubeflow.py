"""The commands of Kubeflow: upload, submit, status, logs, cancel and schedule.

Nothing heavy is imported before a command runs. Where and as whom is the environment's: see docs/kubeflow.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.components.spec.errors import ExitCode
from holdfast.pipelines.cli.options import Fresh, Image, Overrides, Salt, SpecFile, err, one_of_fresh_and_salt, out

if TYPE_CHECKING:
    from holdfast.components.spec import Spec
    from holdfast.pipelines.backends.kubeflow.connection import Server
    from holdfast.pipelines.backends.kubeflow.submit import Plan

Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint", metavar="URL", help="Where KFP answers. Default: KFP_ENDPOINT, else the cluster we are in, else "
        "that of the current kubectl context.", show_default=False,
    ),
]  # fmt: skip
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Your namespace, where Kubeflow has several. Default: KFP_NAMESPACE.",
        show_default=False,
    ),
]  # fmt: skip
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the requests as YAML and send none of them.")]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="KFP's id of the run, Holdfast's (or its beginning), or a name.",
                   show_default=False),
]  # fmt: skip
Store = Annotated[
    str,
    typer.Option(
        "--store", metavar="URL", help="Root of the store, s3://bucket/prefix. Default: the spec's, else "
        "HOLDFAST_STORE of the pods.", show_default=False,
    ),
]  # fmt: skip
ServiceAccount = Annotated[
    str,
    typer.Option(help="Service account of the pipeline's pods. Default: the one KFP was installed with.",
                 show_default=False),
]  # fmt: skip


def upload(
    spec: SpecFile,
    overrides: Overrides = None,
    image: Image = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
) -> None:
    """Put the pipeline of a spec on the KFP server: a new version if its content is new.

    Example: holdfast upload examples/cluster-cpu.yaml --endpoint http://localhost:8888
    """
    from holdfast.pipelines.backends.kubeflow.upload import upload as uploaded

    checked = _spec(spec, overrides)
    server = _connect(endpoint, namespace, dry_run)
    made = uploaded(server, checked, image or None)
    if not _shown(server):
        out(f"{checked.name} {made.version}: {'uploaded' if made.created else 'is there already'}")
        out(f"  {server.link('pipelines', f'{made.pipeline_id}/version/{made.version_id}')}")


def submit(
    spec: SpecFile,
    overrides: Overrides = None,
    store: Store = "",
    image: Image = "",
    service_account: ServiceAccount = "",
    fresh: Fresh = False,
    salt: Salt = "",
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
) -> None:
    """Run a spec on Kubeflow, and print where to watch it. The same again gives the run that is there.

    Example: holdfast submit examples/cluster-cpu.yaml --endpoint http://localhost:8888
    """
    from holdfast.pipelines.backends.kubeflow.submit import plan
    from holdfast.pipelines.backends.kubeflow.submit import submit as submitted

    chosen = one_of_fresh_and_salt(fresh, salt)
    wanted = plan(_spec(spec, overrides), store=store, salt=chosen, service_account=service_account)
    _say_what_is_unread(wanted)
    server = _connect(endpoint, namespace, dry_run)
    made = submitted(server, wanted, image or None)
    if _shown(server):
        return
    out(f"{made.name}: {'submitted' if made.created else f'is there already, {made.state}'}")
    out(f"  {made.link}\n  holdfast status {made.kfp_run_id}")
    if chosen:
        out(f"  to submit the same again: --salt {chosen}")


def status(run: RunName, endpoint: Endpoint = "", namespace: Namespace = "") -> None:
    """Show what became of a run on Kubeflow, step by step.

    Example: holdfast status 3f2a
    """
    from holdfast.pipelines.backends.kubeflow.watch import find_run, state_of, steps_of
    from holdfast.pipelines.view.terminal import duration

    server = _connect(endpoint, namespace)
    found = find_run(server, run)
    out(f"{found.display_name}: {state_of(found)}")
    for step in steps_of(found):
        took = "" if step.seconds is None else duration(step.seconds)
        out(f"  {step.name:<10}  {step.state:<9}  {took:>12}{'  ' + step.error if step.error else ''}")
    if found.error and found.error.message:
        out(f"  {found.error.message}")
    out(f"  {server.link('runs', found.run_id)}")


def logs(
    run: RunName,
    step: Annotated[str, typer.Option(help="Only this step: preprocess, train, evaluate, register or notify.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
) -> None:
    """Print what the steps of a run on Kubeflow wrote.

    Example: holdfast logs 3f2a --step train --follow
    """
    from holdfast.components.steps import STEPS
    from holdfast.pipelines.backends.kubeflow.watch import logs as lines

    if step and step not in STEPS:
        raise typer.BadParameter(f"{step!r} is no step; use one of {', '.join(STEPS)}", param_hint="--step")
    for name, line in lines(_connect(endpoint, namespace), run, step, follow=follow):
        out(line if step else f"[{name}] {line}")


def cancel(run: RunName, endpoint: Endpoint = "", namespace: Namespace = "", dry_run: DryRun = False) -> None:
    """End a run on Kubeflow. Its training saves a checkpoint first, and submitting it again goes on from there.

    Example: holdfast cancel 3f2a
    """
    from holdfast.pipelines.backends.kubeflow.watch import cancel as cancelled
    from holdfast.pipelines.backends.kubeflow.watch import state_of

    server = _connect(endpoint, namespace, dry_run)
    found, ended = cancelled(server, run)
    if not _shown(server):
        out(f"{found.display_name}: {'is being ended' if ended else f'has ended already, {state_of(found)}'}")


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
) -> None:
    """Run a spec on Kubeflow again and again, as its `schedule` says. Changing it never ends a run.

    Example: holdfast schedule examples/cluster-cpu.yaml --set schedule.cron='0 3 * * 1'
    """
    from holdfast.pipelines.backends.kubeflow import schedule as schedules
    from holdfast.pipelines.backends.kubeflow.submit import plan

    if sum((list_, pause, delete)) > 1 or list_ == (spec is not None):
        raise typer.BadParameter("give a SPEC, alone or with one of --pause and --delete; or --list alone")
    if spec is None:
        _list(_connect(endpoint, namespace))
        return
    checked = _spec(spec, overrides)
    if pause or delete:
        server = _connect(endpoint, namespace, dry_run)
        paused = schedules.pause(server, checked.name) if pause else []
        removed, kept = schedules.delete(server, checked.name) if delete else ((), ())
        if not _shown(server):
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
    wanted = plan(checked, store=store, service_account=service_account)
    server = _connect(endpoint, namespace, dry_run)
    made = schedules.schedule(server, wanted, image or None, controller_timezone=controller_timezone)
    if not _shown(server):
        out(f"{checked.name}: {made.when}{'' if made.created else ' (was there already)'}\n  {made.link}")
        _say_former(made.removed, made.kept)


def add_to(app: typer.Typer) -> None:
    """Make the commands part of `app`."""
    for command in (upload, submit, status, logs, cancel, schedule):
        app.command(rich_help_panel="On Kubeflow")(command)


def _spec(path: Path, overrides: Sequence[str] | None) -> Spec:
    from holdfast.components.spec.load import load_spec

    return load_spec(path, overrides or ())


def _connect(endpoint: str, namespace: str, dry_run: bool = False) -> Server:
    from holdfast.pipelines.backends.kubeflow.connection import Access, Server

    return Server(Access.from_environment(endpoint, namespace), dry=dry_run)


def _shown(server: Server) -> bool:
    """Whether this was a dry run, whose requests are then printed."""
    if not server.dry:
        return False
    from holdfast.pipelines.backends.kubeflow.compile import as_yaml

    if server.offline:
        err("no Kubeflow Pipelines is known here: these are the requests to one that has nothing yet")
    out(as_yaml(*map(asdict, server.requests)) if server.requests else "# nothing would be changed")
    return True


def _say_what_is_unread(wanted: Plan) -> None:
    if not wanted.run_id:
        err(
            "note: the sources cannot be read from here, so only a run that has not ended counts as the same "
            f"({wanted.unread})"
        )


def _say_former(removed: Sequence[str], kept: Sequence[str]) -> None:
    if removed:
        out(f"  removed {len(removed)} former schedule{'s' if len(removed) > 1 else ''}")
    if kept:
        out(f"  {len(kept)} former one stays, disabled, until its runs have ended; the next call removes it")


def _list(server: Server) -> None:
    from holdfast.pipelines.backends.kubeflow.schedule import entries

    found = entries(server)
    if not found:
        out(f"no schedules on {server.host}; make one with `holdfast schedule SPEC`")
        raise typer.Exit(int(ExitCode.OK))
    for entry in found:
        state = "enabled" if entry.enabled else "paused"
        running = f", {entry.running} running" if entry.running else ""
        out(f"{entry.pipeline:<24}  {state:<8}  {entry.when}{running}\n  {entry.recurring_run_id}")
