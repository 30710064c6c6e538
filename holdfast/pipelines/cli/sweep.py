"""`holdfast sweep`: trains several values of some fields of a spec, on any backend."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, BackendOptions, DryRun, RunOptions, SpecOptions
from holdfast.pipelines.cli.run import submit

Over = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=VALUE,VALUE", help="A field and its values. Repeat it for a grid.", show_default=False),
]
ConcurrentTrials = Annotated[
    int, typer.Option(min=0, metavar="N", help="Maximum of concurrent trials, on Argo and Slurm. Default: all.")
]


def sweep(
    spec: SpecOptions,
    where: BackendOptions,
    options: RunOptions,
    over: Over = None,
    concurrent_trials: ConcurrentTrials = 0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train a spec with several values of some fields on one dataset, compare them, and register the best one.

    The same command resumes the sweep, or shows the comparison if it has finished. `holdfast show`, `logs`, `stop` and
    `resume` take the id of the sweep or its name, NAME-sweep.

    Example: holdfast sweep examples/quickstart.yaml --over training.optimizer.learning_rate=1e-3,3e-3
    """
    if not over:
        raise typer.BadParameter("give a field and its values", param_hint="--over")
    submit(spec, where, options, dry_run=dry_run, as_json=as_json, over=over, concurrent_trials=concurrent_trials)
