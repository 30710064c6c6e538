"""`holdfast show`: one run or sweep, as a summary or in one of several views. `holdfast rollouts`: its answers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast import api
from holdfast.pipelines.backends import BACKENDS, WITH_ENDPOINT, capabilities_of
from holdfast.pipelines.cli.options import AsJson, BackendOptions, RunName, StoreRoot, err, open_chosen, out, print_json
from holdfast.pipelines.cli.runs import note_unreadable
from holdfast.spec.errors import MissingError, StoreUnreachableError

if TYPE_CHECKING:
    from holdfast.pipelines.backends.interface import RunStatus
    from holdfast.pipelines.view.run_record import RunRecord
    from holdfast.store import Store
    from holdfast.telemetry.event_log import Reached

PRICES = ("accelerator_hour", "kilowatt_hour", "carbon_per_kilowatt_hour")


@dataclass(frozen=True)
class ViewOptions:
    """What `show` prints instead of the summary."""

    steps: Annotated[bool, typer.Option("--steps", help="The state of each step at the backend, and progress.")] = False
    ledger: Annotated[bool, typer.Option("--ledger", help="How every rank spent every second: the goodput.")] = False
    cost: Annotated[bool, typer.Option("--cost", help="Accelerator-hours, energy and cost up to now.")] = False
    spec: Annotated[bool, typer.Option("--spec", help="The summary with the whole spec, including defaults.")] = False
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"With --cost: a price instead of that of the spec: {', '.join(PRICES)}. Repeat it for more prices.",
            show_default=False,
        ),
    ] = None

    def check(self) -> None:
        """Refuse combinations. Raises BadParameter."""
        views = [name for name in ("steps", "ledger", "cost", "spec") if getattr(self, name)]
        if len(views) > 1:
            raise typer.BadParameter(f"give one of {', '.join(f'--{name}' for name in views)}")
        if self.price and not self.cost:
            raise typer.BadParameter("is used only with --cost", param_hint="--price")


def show(run: RunName, view: ViewOptions, where: BackendOptions, as_json: AsJson = False) -> None:
    """Show a run: its state, steps, metrics, verdict, events, spec, and where everything is.

    For a sweep it shows the comparison of the trials. --steps asks the backend, and needs no store. --ledger prints the
    goodput: the share of the time that computed steps which the run kept. --cost uses the prices of the spec
    (`cluster.prices`) or of --price; a figure that is not known is printed with the reason.

    Example: holdfast show 3f2a
    """
    view.check()
    if view.steps or (where.endpoint and not (view.ledger or view.cost or view.spec)):
        _print_status(run, where, as_json)
    elif view.ledger:
        _print_ledger(run, where.store, as_json)
    elif view.cost:
        _print_cost(run, where.store, view.price or [], as_json)
    else:
        _print_summary(run, where, view.spec, as_json)


def _print_summary(run: str, where: BackendOptions, whole_spec: bool, as_json: bool) -> None:
    from holdfast.audit.records import read_audits
    from holdfast.pipelines.view.catalog import find_run
    from holdfast.pipelines.view.report import accounts, print_run

    opened_store = open_chosen(where.store)
    try:
        record = find_run(opened_store, run)
    except (MissingError, StoreUnreachableError) as error:
        if isinstance(error, MissingError) and _print_sweep(run, where, opened_store, as_json):
            return
        named = where.backend or (WITH_ENDPOINT if os.environ.get("KFP_ENDPOINT") else "")
        if not whole_spec and named in BACKENDS and not capabilities_of(named).foreground:
            _print_status(run, where, as_json)  # the backend may know it
            return
        raise
    note_unreadable([record])
    if as_json:
        parts = {"spec": record.spec, "verdict": record.verdict, "result": record.result}
        audits = read_audits(opened_store, record.run_id)
        print_json({**record.as_json(), **parts, "audits": audits, **accounts(record, opened_store)})
        return
    print_run(record, opened_store, whole_spec)
    if status := _waiting(record, where):
        _print_steps(status)


def _waiting(record: RunRecord, where: BackendOptions) -> RunStatus | None:
    """The status of a run of a cluster that has not ended, by its backend; None if it has ended or on an error."""
    from holdfast.spec.errors import HoldfastError

    backend = record.submission.get("backend", "")
    if record.result is not None or record.stopped or backend not in BACKENDS or capabilities_of(backend).foreground:
        return None
    try:
        return api.run_state(record.run_id, replace(where.location, backend="")).status
    except HoldfastError as error:
        err(f"note: the state of the steps cannot be read ({error})")
        return None


def _print_sweep(wanted: str, where: BackendOptions, store: Store, as_json: bool) -> bool:
    """Print the comparison of a sweep, or the steps of one without a comparison. Returns whether there is one."""
    from holdfast.pipelines.view.comparison import print_comparison
    from holdfast.pipelines.view.terminal import SafeConsole

    try:
        comparison = api.comparison(wanted, store)
    except MissingError:
        return False
    if comparison is None:
        _print_status(wanted, where, as_json)
    elif as_json:
        print_json(comparison.model_dump(mode="json"))
    else:
        print_comparison(SafeConsole(), comparison, store)
    return True


def _print_status(run: str, where: BackendOptions, as_json: bool) -> None:
    state = api.run_state(run, where.location)
    if state.note:
        err(f"note: the progress of the training cannot be read ({state.note})")
    if as_json:
        progress = state.progress and asdict(state.progress)
        print_json({**asdict(state.status), "run_id": state.run_id, "progress": progress})
        return
    _print_steps(state.status, state.run_id, state.progress)


def _print_steps(found: RunStatus, run_id: str = "", reached: Reached | None = None) -> None:
    from holdfast.pipelines.view.terminal import duration

    out(f"{found.name}: {found.state}")
    if run_id and run_id not in found.name:
        out(f"  run {run_id}")
    for step in found.steps:
        took = "" if step.seconds is None else duration(step.seconds)
        out(f"  {step.name:<10}  {step.state:<9}  {took:>12}{'  ' + step.error if step.error else ''}")
    if reached is not None and found.unfinished:
        out(f"  {reached.text}")
    for line in filter(None, (found.message, found.link)):
        out(f"  {line}")


def _print_ledger(run: str, store: str, as_json: bool) -> None:
    from holdfast.pipelines.view.ledger import print_ledger

    handle = api.Run(run, store)
    if as_json:
        print_json({"run_id": handle.id, **handle.ledger().as_json()})
        return
    print_ledger(handle.ledger())


def _print_cost(run: str, store: str, prices: list[str], as_json: bool) -> None:
    from holdfast.pipelines.view.ledger import cost_lines

    overrides = _prices(prices)
    handle = api.Run(run, store)
    cost = handle.cost(overrides)
    if as_json:
        print_json({"run_id": handle.id, **cost.as_json()})
        return
    for line in cost_lines(cost):
        out(line)
    for reason in cost.unknown:
        out(f"not known: {reason}")


def _prices(given: list[str]) -> dict[str, Any]:
    """The prices of `NAME=VALUE` items. Raises BadParameter."""
    prices: dict[str, Any] = {}
    for item in given:
        name, _, value = item.partition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = -1.0
        if name not in PRICES or not 0 <= prices[name] < float("inf"):
            raise typer.BadParameter(
                f"{item!r} is not NAME=VALUE with one of {', '.join(PRICES)} and a number from 0", param_hint="--price"
            )
    return prices


def rollouts(
    run: RunName,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="A step. Default: the newest answers.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write an HTML page instead.", show_default=False)
    ] = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Show the answers that a step learned from: prompts, answers, rewards and advantages.

    Answers are recorded by runs with `training.objective: grpo`. See docs/rl.md.

    Example: holdfast rollouts sums --step 100
    """
    from holdfast.pipelines.view.rollouts import print_rollouts, write_page

    found = api.Run(run, store).rollouts(step)
    if as_json:
        print_json(asdict(found))
    elif output is not None:
        out(str(write_page(found, output)))
    else:
        print_rollouts(found)
