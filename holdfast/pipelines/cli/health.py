"""`holdfast health`: probes and compares the ranks of this machine, as a run does at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, StoreRoot, err, out, print_json


def health(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="Use the accelerator and ranks of this spec.", show_default=False),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            max=1024,
            show_default=False,
            help="Number of ranks, one for each accelerator. Default: that of the spec, else 2.",
        ),
    ] = None,
    accelerator: Annotated[
        str,
        typer.Option(
            "--accelerator",
            "-a",
            metavar="KIND",
            help="Kind of accelerator: cpu, nvidia, amd, … Default: the spec's, else cpu.",
            show_default=False,
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Time for the compute and memory probes.")] = 5.0,
    store: StoreRoot = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: arithmetic, speed, memory, links, disk, store, clock, hardware faults.

    Compares each rank with its peers, and with the usual speed of its accelerator if that is known. Prints the rates of
    each rank, and each problem. Ends with 0 if nothing failed, and with 210 if something failed. Ends with 208 if bits
    differ and the wrong rank is unknown.

    Example: holdfast health examples/gpu.yaml --seconds 10
    """
    from holdfast.api.machines import health as examine
    from holdfast.pipelines.paths import load_spec
    from holdfast.pipelines.view.health import print_report

    checked_spec = load_spec(spec, overrides or ()) if spec else None
    result = examine(checked_spec, ranks=processes, accelerator=accelerator, seconds=seconds, store=store)
    if result.report is None:
        if as_json:
            print_json({"error": {"code": result.code, "message": result.reason}})
        err(f"error: the health check did not finish: {result.reason}")
    else:
        out(result.report.model_dump_json(indent=2) if as_json else print_report(result.report))
    raise typer.Exit(result.code)
