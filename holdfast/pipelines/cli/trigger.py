"""`holdfast trigger`: whether a retraining is due, and why, for a person or a script.

Leaves deciding to `holdfast.components.trigger`, which is also the first step of a DAG that runs by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import Overrides, SpecFile, StoreRoot, out
from holdfast.spec.errors import ExitCode

if TYPE_CHECKING:
    from holdfast.components.trigger import Decision


def trigger(
    spec: SpecFile,
    overrides: Overrides = None,
    store: StoreRoot = "",
    salt: Annotated[str, typer.Option(help="The salt that the retraining would have.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole decision as JSON.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with 4 when nothing is due.")] = False,
) -> None:
    """Say whether a retraining is due, and why. Trains nothing.

    Example: holdfast trigger examples/quickstart.yaml --exit-code && holdfast run examples/quickstart.yaml
    """
    decision = decide(spec, overrides or (), store, salt)
    out(decision.model_dump_json(indent=2) if as_json else f"{decision.word.replace('_', ' ')}: {decision.reason}")
    raise typer.Exit(int(ExitCode.NOT_DUE if exit_code and not decision.due else ExitCode.OK))


def decide(spec_path: Path, overrides: Sequence[str] = (), store: str = "", salt: str = "") -> Decision:
    """The decision for the spec at `spec_path`. Raises what `load_spec` and `holdfast.components.trigger.run` raise."""
    from holdfast.components.trigger import run
    from holdfast.pipelines.paths import store_root, with_absolute_paths
    from holdfast.runtime.environment import store_url
    from holdfast.spec import load_spec
    from holdfast.store import open_store

    checked = with_absolute_paths(load_spec(spec_path, overrides))
    return run(checked, open_store(store_root(store) if store else store_url(checked)), salt)
