"""`holdfast rollouts`: the answers that a step learned from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from holdfast import api
from holdfast.pipelines.cli.options import AsJson, RunName, StoreRoot, out, print_json


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
