"""`holdfast calibrate`: what the planner's figures are on the machine at hand, and how far its predictions are off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.pipelines.cli.options import AsJson, out, print_json

if TYPE_CHECKING:
    from holdfast.planning.calibration import Calibration

MEASURED = ("cpu", "nvidia", "amd")  # kinds of accelerators whose work torch waits for in a way that is known here


def calibrate(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="Ranks that work at once. Default on a CPU: a core each.", show_default=False
        ),
    ] = None,
    accelerator: Annotated[
        str, typer.Option("--accelerator", "-a", metavar="KIND", help="cpu, nvidia or amd.")
    ] = "cpu",
    file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Default: calibration.json in HOLDFAST_HOME.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives, products and steps on this machine, and keep them for `holdfast plan --calibration`.

    Prints each prediction beside what was measured. Let nothing else run meanwhile: it takes a minute or two.

    Example: holdfast calibrate --ranks 2
    """
    import os

    from holdfast.pipelines.measure import calibrate as measure
    from holdfast.pipelines.view.planning import print_calibration
    from holdfast.planning import calibration

    if accelerator not in MEASURED:
        raise typer.BadParameter(f"{accelerator}: use one of {', '.join(MEASURED)}", param_hint="--accelerator")
    if ranks is None and accelerator != "cpu":
        raise typer.BadParameter("say how many accelerators this machine has", param_hint="--ranks")
    found = measure(ranks or len(os.sched_getaffinity(0)), accelerator)
    path = file or calibration.default_path()
    calibration.write(found, path)
    if as_json:
        print_json(_as_json(found, path))
        return
    print_calibration(found)
    out(f"kept in {path}; to plan with it: holdfast plan SPEC --calibration {path}")


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
