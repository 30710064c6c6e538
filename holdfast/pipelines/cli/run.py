"""The commands that start and resume a run or a sweep, on any backend."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import typer

from holdfast import api
from holdfast.api.submission import new_salt
from holdfast.pipelines.backends import capabilities_of
from holdfast.pipelines.cli.options import (
    AsJson,
    BackendOptions,
    DryRun,
    Fresh,
    Replan,
    RunName,
    RunOptions,
    SpecOptions,
    err,
    out,
    print_json,
    print_yaml,
)
from holdfast.search.method import DEFAULT_REDUCTION, METHODS, Method, Search
from holdfast.spec.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.api import Submission
    from holdfast.pipelines.backends.request import RunRequest
    from holdfast.search.method import Search

Over = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=VALUES",
        help="A field and its values, or with --search its range LOW..HIGH, LOW..HIGH log.",
        show_default=False,
    ),
]
ConcurrentTrials = Annotated[
    int, typer.Option(min=0, metavar="N", help="Maximum of concurrent trials, on Argo and Slurm. Default: all.")
]


def run(
    spec: SpecOptions,
    where: BackendOptions,
    options: RunOptions,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a spec: on this machine, or with --backend on a cluster. It ends with a registered model.

    The same command resumes the run, or shows the result if the run has finished. On this machine it shows the progress
    until the end. On a cluster it submits the run, and prints its link and the command that shows its state.

    Example: holdfast run examples/quickstart.yaml --set training.steps=50
    """
    from dataclasses import replace

    if fresh and options.salt:
        raise typer.BadParameter("--fresh draws a new salt; give one of --fresh and --salt")
    if fresh:
        options = replace(options, salt=new_salt())
    submit(spec, where, options, dry_run=dry_run, as_json=as_json)


def submit(
    spec: SpecOptions,
    where: BackendOptions,
    options: RunOptions,
    *,
    dry_run: bool,
    as_json: bool,
    over: Sequence[str] | Search = (),
    concurrent_trials: int = 0,
) -> None:
    """Submit a spec, or a sweep over it, and print where it runs; or print what would be sent."""
    name = api.default_backend(where.backend)
    cluster = api.ClusterOptions(
        options.image, options.service_account, where.endpoint, where.namespace, concurrent_trials
    )
    request = api.request(
        spec.path,
        backend=name,
        overrides=spec.overrides or (),
        store=where.store,
        salt=options.salt,
        replan=options.replan,
        over=over,
        options=cluster,
    )
    foreground = capabilities_of(name).foreground
    if not request.run_id and not foreground:
        err(
            "note: the run id is known when preprocess has ended, and `holdfast show` prints it then; only a run "
            f"that has not ended counts as the same ({request.unread})"
        )
    if dry_run:
        _print_preview(request, name, cluster, as_json)
        return
    again = shlex.join(["holdfast", *_without_salt(sys.argv[1:])]) if foreground and not over else ""
    submission = api.submit(request, backend=name, options=cluster, console=_console(as_json), again=again)
    _print_submission(submission, as_json)


def resume(run: RunName, where: BackendOptions, replan: Replan = False, as_json: AsJson = False) -> None:
    """Resume a run or a sweep that has stopped, from its newest checkpoint.

    It resumes where it was submitted, or on the backend that you name. A run that has not ended continues unchanged.

    Example: holdfast resume 3f2a
    """
    submission = api.resume(run, at=where.location, replan=replan, console=_console(as_json))
    if submission.maker is not None and (versions := submission.maker.in_words):
        condition = ", only if its steps have those versions" if submission.maker.other_results else ""
        err(f"note: the run was made by {versions}; it continues with the same bits{condition}")
    if submission.skipped_last:
        err("note: the last submission was refused for its plan; resuming the one before it (--replan: the last one)")
    _print_submission(submission, as_json)


def _console(as_json: bool) -> Console | None:
    """Where a run of this machine shows its progress: with --json on standard error."""
    if not as_json:
        return None
    from holdfast.pipelines.view.terminal import SafeConsole

    return SafeConsole(stderr=True)


def _print_submission(made: Submission, as_json: bool) -> None:
    """Print a submission, and end with the exit code of its run."""
    status, request = made.run, made.request
    if made.record_error:
        err(f"note: where it runs is not kept in {made.store}, so name it with --backend ({made.record_error})")
    if as_json:
        print_json({"run": status, "created": made.created, "run_id": made.run_id, "salt": request.salt})
    elif not capabilities_of(status.backend).foreground and request.search is None:  # else the terminal shows all
        from holdfast.runtime.environment import store_url

        out(f"{status.name}: {'submitted' if made.created else f'exists already, {status.state}'}")
        # The record of where it runs is in its store, which another shell does not know.
        store = request.store or request.spec.store
        store_option = f" --store {store}" if store and store != store_url() else ""
        out(f"  {status.link}\n  holdfast show {status.id}{store_option}")
        if request.salt:
            out(f"  to submit the same again: --salt {request.salt}")
    raise typer.Exit(status.exit_code or int(ExitCode.OK))


def _print_preview(wanted: RunRequest, backend: str, options: api.ClusterOptions, as_json: bool) -> None:
    """Print what would be sent, and on standard error the result of its check against the cluster."""
    objects = api.preview(wanted, backend=backend, options=options)
    if as_json:
        print_json(objects)
    elif objects:
        print_yaml(objects)
    else:
        out("# nothing would be changed")
    results = api.check_preview(objects, wanted, backend, options)
    for result in results:
        err(f"checked by {result.by}: objects: {result.checked}, problems: {len(result.problems)}")
        if result.unseen:
            err(f"not checked: {', '.join(dict.fromkeys(result.unseen))}")
        for problem in result.problems:
            err(problem)
    if any(result.problems for result in results):
        raise typer.Exit(int(ExitCode.BAD_SPEC))


def _without_salt(arguments: list[str]) -> list[str]:
    """The command line without --fresh and --salt, which the advice on how to resume adds itself."""
    remaining: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument == "--fresh" or argument.startswith("--salt="):
            skip = False
        elif argument == "--salt":
            skip = True
        else:
            remaining.append(argument)
    return remaining


@dataclass(frozen=True)
class MethodOptions:
    """How a sweep chooses its trials."""

    method: Annotated[str, typer.Option("--search", metavar="METHOD", help="random, tpe or asha. Default: a grid.")] = (
        ""
    )
    trials: Annotated[int, typer.Option(min=0, metavar="N", help="Trials of a search.")] = 0
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of a search.")] = 0
    reduction: Annotated[
        int, typer.Option(min=0, metavar="N", help="asha: one of N trials is promoted. Default: 3.")
    ] = 0
    min_steps: Annotated[
        int, typer.Option(min=0, metavar="N", help="asha: steps before the first promotion. Default: two promotions.")
    ] = 0

    def of(self, over: list[str]) -> list[str] | Search:
        """The grid or the search over these fields. Raises BadParameter."""
        if not self.method:
            if self.trials or self.seed or self.reduction or self.min_steps:
                raise typer.BadParameter("a grid has none of --trials, --seed, --reduction and --min-steps")
            return over
        if self.method not in METHODS:
            raise typer.BadParameter(f"{self.method!r}: use one of {', '.join(METHODS)}", param_hint="--search")
        if not self.trials:
            raise typer.BadParameter("say how many trials: --trials N", param_hint="--trials")
        reduction = self.reduction or DEFAULT_REDUCTION
        return Search(cast("Method", self.method), tuple(over), self.trials, self.seed, reduction, self.min_steps)


def sweep(
    spec: SpecOptions,
    where: BackendOptions,
    options: RunOptions,
    search: MethodOptions,
    over: Over = None,
    concurrent_trials: ConcurrentTrials = 0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train a spec with several values of some fields on one dataset, compare them, and register the best one.

    The values are those of a grid, or --search chooses them from ranges: `random`, by Optuna's sampler (`tpe`), or at
    random with most trials stopped early (`asha`). The same command resumes the sweep, or shows the comparison if it
    has finished. `holdfast show`, `logs`, `stop` and `resume` take the id of the sweep or its name, NAME-sweep.

    Example: holdfast sweep examples/quickstart.yaml --over training.optimizer.learning_rate=1e-3,3e-3
    """
    if not over:
        raise typer.BadParameter("give a field and its values", param_hint="--over")
    trials = search.of(over)
    submit(spec, where, options, dry_run=dry_run, as_json=as_json, over=trials, concurrent_trials=concurrent_trials)
