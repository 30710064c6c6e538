"""`holdfast health`: probes and compares the ranks of this machine, as a run does at its start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, StoreRoot, err, out

if TYPE_CHECKING:
    from holdfast.health import Report
    from holdfast.spec import Spec


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
    """  # fmt: skip
    from holdfast.pipelines.view.health import print_report
    from holdfast.spec.load import load_spec

    checked = load_spec(spec, overrides or ()) if spec else None
    ranks = processes or (checked.parallel.processes if checked else 2)
    kind = accelerator or (checked.cluster.accelerator if checked else "cpu")
    report, code, why = _examined(checked, ranks, kind, seconds, _store(store, checked))
    if report is None:
        err(f"error: the health check did not finish: {why}")
    else:
        out(report.model_dump_json(indent=2) if as_json else print_report(report))
    raise typer.Exit(code)


def _store(chosen: str, spec: Spec | None) -> str:
    from holdfast.pipelines.paths import store_root
    from holdfast.runtime.environment import store_url

    return store_root(chosen) if chosen else store_url(spec)


def _examined(spec: Spec | None, ranks: int, kind: str, seconds: float, store: str) -> tuple[Report | None, int, str]:
    """The report of a gang on this machine, its exit code, and without a report the end of its log."""

    from holdfast.health import Report
    from holdfast.launch import Job, LocalLauncher
    from holdfast.launch.accelerators import ACCELERATORS
    from holdfast.runtime.temporary import temporary_folder
    from holdfast.spec.cluster import Cluster
    from holdfast.spec.errors import Problem, SpecError

    if kind not in ACCELERATORS:
        raise SpecError([Problem("--accelerator", kind, "is not known", f"use one of {', '.join(ACCELERATORS)}")])
    cluster = (spec.cluster if spec else Cluster()).model_copy(update={"accelerator": kind})
    with temporary_folder("health") as folder:
        path = Path(folder) / "report.json"
        command = ["-m", "holdfast.health.program", "--accelerator", kind, "--seconds", str(seconds),
                   "--store", store, "--report", str(path)]  # fmt: skip
        launcher = LocalLauncher(Path(folder))
        threads = spec.parallel.threads if spec else 1
        try:
            ending = launcher.run(Job("health", "health", 0, command, ranks, threads, 5.0, cluster))
        finally:
            launcher.close()
        if path.exists():
            return Report.model_validate_json(path.read_text(encoding="utf-8")), ending.code, ""
        return None, ending.code, "\n".join(ending.log_tail[-10:]) or ending.detail
