"""`holdfast trigger`: whether a retraining is due, and why, for a person or a script.

`holdfast.components.trigger` decides; it is also the first step of a scheduled DAG.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.pipelines.cli.options import SpecOptions, StoreRoot, out
from holdfast.spec.errors import ExitCode


def trigger(
    spec: SpecOptions,
    store: StoreRoot = "",
    salt: Annotated[str, typer.Option(help="The salt that the retraining would have.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole decision as JSON.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with 4 when nothing is due.")] = False,
) -> None:
    """Print whether a retraining is due, and why. Trains nothing.

    Example: holdfast trigger examples/quickstart.yaml --exit-code && holdfast run examples/quickstart.yaml
    """
    from holdfast.api.specs import trigger as decide

    decision = decide(spec.load(), store=store, salt=salt)
    out(decision.model_dump_json(indent=2) if as_json else f"{decision.word.replace('_', ' ')}: {decision.reason}")
    raise typer.Exit(int(ExitCode.NOT_DUE if exit_code and not decision.due else ExitCode.OK))
