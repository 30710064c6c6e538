"""`holdfast doctor`: checks of a cluster, the store and MLflow. Also the version of Holdfast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from holdfast.pipelines.cli.options import Overrides, StoreRoot, out


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="Check the needs of this spec.", show_default=False)
    ] = None,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            "-n",
            help="Namespace to check. Default: the spec's, else the current one.",
            show_default=False,
        ),
    ] = "",
    store: StoreRoot = "",
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME",
            show_default=False,
            help="slurm or ray: check that. Any other backend, and the default: check Kubernetes.",
        ),
    ] = "",
    service_account: Annotated[
        str,
        typer.Option(
            "--service-account", help="Service account of the train step. Default: the first known one that exists."
        ),
    ] = "",
    all_: Annotated[
        bool, typer.Option("--all", help="Also check what Holdfast can use and the spec does not need.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    overrides: Overrides = None,
) -> None:
    """Check a cluster, the store and MLflow for what a run needs, and show how to fix what is missing.

    Prints one finding for each check. Ends with 0 if no check failed, else with the code of the first
    failure.

    Example: holdfast doctor examples/gpu.yaml --namespace holdfast
    """
    from holdfast.api.machines import Location
    from holdfast.api.machines import doctor as examine
    from holdfast.pipelines import doctor
    from holdfast.pipelines.paths import load_spec

    checked_spec = load_spec(spec, overrides or ()) if spec else None
    location = Location(backend, store, namespace=namespace)
    findings = examine(checked_spec, at=location, service_account=service_account, everything=all_)
    out(json.dumps(doctor.as_json(findings), indent=2) if as_json else doctor.print_findings(findings))
    raise typer.Exit(int(doctor.exit_code(findings)))


def installed() -> str:
    """The version of this installation."""
    from importlib.metadata import version as version_of

    return version_of("holdfast")
