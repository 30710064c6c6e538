"""The command that sweeps over fields of a spec, wherever the trials run, and shows what came of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from holdfast.pipelines.cli.options import (
    AsJson,
    DryRun,
    Endpoint,
    Image,
    Namespace,
    Overrides,
    Replan,
    Salt,
    ServiceAccount,
    StoreRoot,
    open_chosen,
    out,
    print_json,
)
from holdfast.pipelines.cli.run_lookup import BackendName
from holdfast.pipelines.cli.submit import submit_order


class Target(StrEnum):
    """What the DAG of a sweep is written for."""

    KUBEFLOW = "kubeflow"
    ARGO = "argo"


def sweep(
    spec: Annotated[Path | None, typer.Argument(metavar="SPEC", help="The spec file.", show_default=False)] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,VALUE", help="A field and its values. Repeat it for a grid.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    backend: BackendName = "",
    at_once: Annotated[
        int, typer.Option(min=0, metavar="N", help="So many trials at once, on Argo and Slurm. Default: all.")
    ] = 0,
    store: StoreRoot = "",
    salt: Salt = "",
    image: Image = "",
    service_account: ServiceAccount = "",
    replan: Replan = False,
    endpoint: Endpoint = "",
    namespace: Namespace = "",
    dry_run: DryRun = False,
    emit: Annotated[
        Target | None, typer.Option(help="Write the DAG for a cluster instead of running it.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file of --emit.", show_default=False)
    ] = None,
    show: Annotated[
        str,
        typer.Option(metavar="SWEEP", help="Show the comparison of a sweep: its id, or its name.", show_default=False),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Train a spec with several values of some fields on one dataset, compare them, and register the best.

    The same command again goes on where it was, or shows the comparison at once when the work is done. `holdfast
    status`, `logs`, `cancel` and `resume` take the sweep's id or its name, NAME-sweep, as they take those of a run.

    Example: holdfast sweep examples/quickstart.yaml --over training.optimizer.learning_rate=1e-3,3e-3
    """
    if show:
        _show(show, store, as_json)
        return
    if spec is None:
        raise typer.BadParameter("give a spec and --over, or --show with the name of a sweep", param_hint="SPEC")
    from holdfast.pipelines.trials import grid
    from holdfast.spec.load import load_spec

    checked = load_spec(spec, overrides or ())
    trials = grid(checked, over or ())
    if emit is None:
        submit_order(
            checked, backend or "local", store=store, salt=salt, image=image, service_account=service_account,
            replan=replan, endpoint=endpoint, namespace=namespace, dry_run=dry_run, as_json=as_json, trials=trials,
            at_once=at_once,
        )  # fmt: skip
        return
    from holdfast.pipelines.documents import as_yaml, write_whole

    if emit is Target.KUBEFLOW:
        from holdfast.pipelines.backends.kubeflow.compile import order_text
        from holdfast.pipelines.backends.request import RunRequest

        text = order_text(RunRequest(checked, image=image, trials=trials))
    else:
        from holdfast.pipelines.backends.argo.sweep import sweep_objects

        text = as_yaml(*sweep_objects(checked, trials, at_once=at_once, image=image or None))
    if output is None:
        out(text)
    else:
        write_whole(output, text)


def _show(wanted: str, store: str, as_json: bool) -> None:
    from holdfast.pipelines.view.console import SafeConsole
    from holdfast.pipelines.view.sweep import find_comparison, print_comparison

    opened = open_chosen(store)
    found = find_comparison(opened, wanted)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print_comparison(SafeConsole(), found, opened)
