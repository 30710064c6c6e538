"""`holdfast sweep`: trains several values of some fields of a spec, on any backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

import typer

from holdfast.pipelines.cli.options import AsJson, BackendOptions, DryRun, RunOptions, SpecOptions
from holdfast.pipelines.cli.run import submit
from holdfast.search.method import DEFAULT_REDUCTION, METHODS, Method, Search

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
