"""`holdfast doctor`, `holdfast health` and `holdfast calibrate`: checks and measurements of machines and clusters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.pipelines.cli.options import AsJson, Overrides, StoreRoot, err, out, print_json

if TYPE_CHECKING:
    from holdfast.health import Measured, Report
    from holdfast.planning.calibration import Calibration

SHOWN = 64  # ranks


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


def calibrate(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Concurrent ranks. Default on a CPU: one for each core.", show_default=False
        ),
    ] = None,
    accelerator: Annotated[
        str, typer.Option("--accelerator", "-a", metavar="KIND", help="Kind of accelerator: cpu, nvidia, amd.")
    ] = "cpu",
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File to write. Default: calibration.json in HOLDFAST_HOME.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives, matrix products and training steps on this machine for `holdfast plan --calibration`.

    Writes a calibration file, and prints each prediction next to its measurement. It takes one or two minutes. Run
    nothing else meanwhile.

    Example: holdfast calibrate --ranks 2
    """
    from holdfast.api.machines import calibrate as measure
    from holdfast.pipelines.view.planning import print_calibration

    calibration, path = measure(ranks, accelerator, file)
    if as_json:
        print_json(_as_json(calibration, path))
        return
    print_calibration(calibration)
    out(f"written to {path}; to plan with it: holdfast plan SPEC --calibration {path}")


def _as_json(found: Calibration, path: Path) -> dict[str, Any]:
    return {
        "file": str(path),
        "calibration": found.model_dump(mode="json"),
        "lines": [line.model_dump() for line in found.lines()],
        "predicted": {
            "collectives": [found.predicted(point) for point in found.points],
            "steps": [found.step(step).seconds for step in found.steps],
        },
        "errors": found.errors(),
    }


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

    checked_spec = load_spec(spec, overrides or ()) if spec else None
    result = examine(checked_spec, ranks=processes, accelerator=accelerator, seconds=seconds, store=store)
    if result.report is None:
        if as_json:
            print_json({"error": {"code": result.code, "message": result.reason}})
        err(f"error: the health check did not finish: {result.reason}")
    else:
        out(result.report.model_dump_json(indent=2) if as_json else print_report(result.report))
    raise typer.Exit(result.code)


def print_report(report: Report) -> str:
    """The report as text."""
    from holdfast.health.verdict import shown_rate

    rows = [["rank", "node", "device", "compute", "memory", "disk", "store", "clock"]]
    for measured in report.measured[:SHOWN]:
        rates = [
            shown_rate(measured.rates[probe], probe) if probe in measured.rates else "-"
            for probe in ("compute", "memory", "disk", "store")
        ]
        rows.append([str(measured.rank), measured.node, measured.device, *rates, _clock(measured)])
    lines = _table(rows)
    if len(report.measured) > SHOWN:
        lines.append(f"and {len(report.measured) - SHOWN} more ranks: see --json")
    if report.links:
        pairs = [link.rate for link in report.links]
        lines.append(
            f"links: {len(pairs)} pairs, {shown_rate(min(pairs), 'link')} at least and "
            f"{shown_rate(median(pairs), 'link')} in the median; all in a ring {shown_rate(report.ring or 0, 'link')}"
        )
    versions = next((measured.versions for measured in report.measured if measured.versions), {})
    lines.append(", ".join(f"{name} {value}" for name, value in versions.items() if name != "device"))
    notes = dict.fromkeys(note for measured in report.measured for note in measured.notes)
    lines += [f"not looked at: {note}" for note in notes]
    lines += [f"{finding.severity}: {finding.words}" for finding in report.findings]
    count = f"{len(report.measured)} rank{'s' if len(report.measured) != 1 else ''}"
    failed = f"FAILED on {', '.join(report.failed_nodes)}" if report.failures else "no rank failed"
    lines.append(f"{failed}; {count} in {report.seconds:.1f} s")
    return "\n".join(lines)


def _clock(one: Measured) -> str:
    if one.clock_ahead is None:
        return "-"
    excess = abs(one.clock_ahead) - one.clock_error
    return "with the store's" if excess < 0 else f"{one.clock_ahead:+.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
