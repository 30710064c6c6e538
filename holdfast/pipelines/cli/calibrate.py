"""`holdfast calibrate`: measures this machine for the planner, and the error of the planner's predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.pipelines.cli.options import AsJson, out, print_json

if TYPE_CHECKING:
    from holdfast.planning.calibration import Calibration


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
