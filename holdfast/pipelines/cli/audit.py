"""Commands that inspect or repeat what a run computed: `holdfast audit`, and `fork`."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from holdfast import api
from holdfast.api.run_handle import replayable_spec
from holdfast.pipelines.cli.options import AsJson, Overrides, RunName, StoreRoot, open_chosen, out, print_json
from holdfast.spec.errors import DataError, ExitCode, MissingError, SpecError

if TYPE_CHECKING:
    from holdfast.spec import Spec
    from holdfast.store import Store

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inspect, compare and repeat what a run computed.",
)


@app.command()
def batch(
    run: RunName,
    step: Annotated[int, typer.Argument(metavar="STEP", help="A step; the first one is 1.", show_default=False)],
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Show one micro-batch of the global batch; the first is 0.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Also print the text of each row.")] = False,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Show the data that a step was trained on: its rows, and their documents, files and lines.

    A batch needs no record: it follows from the dataset, the seed and the step. Files and lines are named only if the
    sources are unchanged since the dataset was made.

    Example: holdfast audit batch 3f2a 1200 --micro-batch 3 --text
    """
    from holdfast.pipelines.view.audit import print_batch

    record = api.Run(run, store)
    data = record.batch(step, micro_batch)
    if as_json:
        print_json(data)
        return
    print_batch(record.id, data, text)


@app.command()
def diff(
    one: RunName,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The run to compare with.", show_default=False)],
    store: StoreRoot = "",
    other_store: Annotated[
        str,
        typer.Option(metavar="URL", help="Store of the second run. Default: that of the first.", show_default=False),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show where two runs diverge, to the bit: the first step, and the tensor and element in the nearest checkpoints.

    Of each step it compares what no interruption changes: loss, gradient norm, learning rate, tokens, samples, and
    state digests if both runs have them. Also prints the differences between the two specs. Ends with 0 if the runs
    are equal as far as both go, and with 6 if they differ.

    Example: holdfast audit diff 3f2a 9b1c
    """
    from holdfast.pipelines.view.audit import print_divergence, spec_differences
    from holdfast.pipelines.view.checkpoints import bytes_read

    runs = api.Run(one, store), api.Run(other, other_store or store)
    records = [run.record() for run in runs]
    with bytes_read("compared", quiet=as_json) as progress:
        divergence = api.diff_runs(*runs, progress)
    differences = spec_differences(records[0], records[1])
    if as_json:
        print_json({"equal": divergence.none, "divergence": divergence, "spec_differences": differences})
    else:
        print_divergence(records[0], records[1], divergence, differences)
    raise typer.Exit(int(ExitCode.OK if divergence.none else ExitCode.MISMATCH))


def fork(
    run: RunName,
    to: Annotated[int, typer.Option("--to", metavar="STEP", help="Step of a checkpoint.", show_default=False)],
    overrides: Overrides = None,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Create a new run that starts from a checkpoint of another run. With --set it continues differently from there.

    Prints the id of the new run, and the command that continues it. No tensor is copied: the new run starts from the
    bytes of the other run's checkpoint, which is pinned for it.

    Example: holdfast fork 3f2a --to 1200 --set training.optimizer.learning_rate=1.0e-4
    """
    forked = api.Run(run, store).fork(to, overrides or ())
    if as_json:
        print_json(forked)
        return
    store_option = f" --store {store}" if store else ""
    out(f"run {forked.run_id} starts from step {forked.step} of run {forked.parent}; that checkpoint is pinned for it")
    out(f"to continue: holdfast resume {forked.run_id}{store_option}")


@app.command()
def replay(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="A run: its id, a prefix of the id, or its name. Default with --sample: all runs that changed "
            "--within the last hours.",
            show_default=False,
        ),
    ] = "",
    steps: Annotated[
        str, typer.Option(metavar="A-B", help="First and last step, or a single step.", show_default=False)
    ] = "",
    sample: Annotated[
        int,
        typer.Option(min=0, help="Number of stretches to draw that no earlier sample computed.", show_default=False),
    ] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sample.", show_default="random, and printed")] = None,
    longest: Annotated[int, typer.Option(min=1, help="Maximum number of steps in a stretch.")] = 100,
    within: Annotated[float, typer.Option(min=0.0, help="Hours, for a sample without RUN.")] = 24.0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Replay even if this machine computes differently from the run's.")
    ] = False,
    losses: Annotated[
        bool, typer.Option("--losses", help="Also show the loss of each document of the step, highest first.")
    ] = False,
    store: StoreRoot = "",
    as_json: AsJson = False,
) -> None:
    """Compute steps of a run again on this machine, and compare them bit for bit with the run's records.

    It starts from the checkpoint before the first step, with as many ranks as the run had. --steps changes nothing in
    the store. --sample draws stretches, each from one checkpoint to the next, and writes its findings under the run.
    Ends with 0 if all figures are the same. Ends with 6 if a step differs, and names the first one. Ends with 18 if
    this machine does not match that of the run.

    --losses shows what data made a spike. It takes a single step.

    Example: holdfast audit replay 3f2a --steps 1200-1220
    holdfast audit replay 3f2a --steps 1207 --losses
    """
    if bool(steps) == bool(sample):
        raise typer.BadParameter("use either --steps A-B or --sample N")
    if sample:
        if losses:
            raise typer.BadParameter("not with --sample: name one step with --steps N", param_hint="--losses")
        if anyway:
            raise typer.BadParameter("not with --sample: a difference would prove nothing", param_hint="--anyway")
        _sampled(run, sample, seed, longest, within, store, as_json)
    if not run:
        raise typer.BadParameter("--steps needs one run; name it", param_hint="RUN")
    from holdfast.audit.replay_job import replay_steps
    from holdfast.pipelines.view.audit import print_replayed, steps_done
    from holdfast.pipelines.view.catalog import find_run

    low, dash, high = steps.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not dash)):
        raise typer.BadParameter(f"{steps!r} is not A-B, such as 1200-1220", param_hint="--steps")
    first, last = int(low), int(high or low)
    if losses and first != last:
        raise typer.BadParameter(f"takes one step, not {steps}: use --steps {last}", param_hint="--losses")
    opened_store = open_chosen(store)
    record = find_run(opened_store, run)
    spec = replayable_spec(opened_store, record)
    if losses:
        _with_losses(api.Run(record.run_id, store), opened_store, spec, first, anyway, as_json)
    with steps_done(quiet=as_json) as progress:
        result = replay_steps(opened_store, record.run_id, spec, first, last, anyway=anyway, progress=progress)
    if as_json:
        print_json({"equal": result.none, "replay": result})
    else:
        print_replayed(record.run_id, result)
    raise typer.Exit(int(ExitCode.OK if result.none else ExitCode.MISMATCH))


def _with_losses(run: api.Run, opened_store: Store, spec: Spec, step: int, anyway: bool, as_json: bool) -> NoReturn:
    from holdfast.audit.document_losses import replay_losses, require_token_losses
    from holdfast.pipelines.view.audit import print_losses, print_replayed, steps_done

    require_token_losses(spec)
    batch = run.batch(step)
    with steps_done(quiet=as_json) as progress:
        result, losses = replay_losses(opened_store, run.id, spec, batch, anyway=anyway, progress=progress)
    equal = result.none and losses.agrees
    if as_json:
        print_json({"equal": equal, "replay": result, "losses": losses})
    else:
        print_replayed(run.id, result)
        print_losses(losses)
    raise typer.Exit(int(ExitCode.OK if equal else ExitCode.MISMATCH))


def _sampled(
    run: str, sample: int, seed: int | None, longest: int, within: float, store: str, as_json: bool
) -> NoReturn:
    from secrets import randbits

    from holdfast.audit.sampling import audit
    from holdfast.pipelines.view.audit import print_audit, steps_done
    from holdfast.pipelines.view.catalog import all_runs, find_run

    opened_store = open_chosen(store)
    if run:
        record = find_run(opened_store, run)
        specs = {record.run_id: replayable_spec(opened_store, record)}
    else:
        since = time.time() - within * 3600
        recent = (entry for entry in all_runs(opened_store) if entry.changed >= since and entry.checkpoints)
        specs = {}
        for entry in recent:
            # Of another version, or a script of another machine.
            with suppress(ValueError, SpecError, DataError, MissingError):
                specs[entry.run_id] = replayable_spec(opened_store, entry)
    with steps_done(quiet=as_json) as progress:
        result = audit(opened_store, specs, sample, randbits(32) if seed is None else seed, longest, progress)
    if as_json:
        print_json({"equal": result.code != ExitCode.MISMATCH, "audit": result})
    else:
        print_audit(result)
    raise typer.Exit(int(result.code))
