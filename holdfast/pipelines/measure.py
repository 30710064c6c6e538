"""Measurements of this machine for the planner, in separate processes that start like a launch and end with this one.

`holdfast/components/train` has the measuring code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.processes import PARENT_VARIABLE as PARENT
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec.errors import HoldfastError, Problem, SpecError

if TYPE_CHECKING:
    from holdfast.planning.calibration import Calibration
    from holdfast.planning.schedule import StageCosts
    from holdfast.spec import Spec

MACHINE = "holdfast.rank.measure.calibrate"
STAGES = "holdfast.rank.measure.stage_costs"
LONGEST = 1800.0  # seconds; a machine with two cores takes about one minute
REPETITIONS = 7
SHOWN = 15  # lines of output


class MeasureError(HoldfastError):
    """A measuring process ended without a result."""


def calibrate(ranks: int, kind: str = "cpu", steps: int = 5) -> Calibration:
    """Measure with `ranks` ranks on accelerators of `kind`, `steps` steps of each layout.

    Raises MeasureError with the ranks' output.
    """
    from holdfast.planning.calibration import read

    with temporary_folder() as folder:
        path = Path(folder) / "calibration.json"
        arguments = [
            "holdfast.launch.torchrun",
            "--nnodes=1",
            f"--nproc-per-node={ranks}",
            "-m",
            MACHINE,
            "--out",
            str(path),
            "--accelerator",
            kind,
            "--steps",
            str(steps),
        ]
        environment = {
            **ACCELERATORS[kind].environment,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        _run(arguments, environment, path, "use fewer ranks: --ranks")
        return read(path)


def stage_costs(spec: Spec, vocabulary: int) -> StageCosts:
    """Measure the parts of a spec's pipeline stages on this machine.

    Raises SpecError for a spec without a pipeline, and MeasureError with the process's output.
    """
    from holdfast.planning.schedule import StageCosts

    if spec.parallel.pipeline == 1:
        problem, remedy = "has no stages that could be balanced", "add --set parallel.pipeline=2, or more"
        raise SpecError([Problem("parallel.pipeline", 1, problem, remedy)])
    with temporary_folder() as folder:
        path, out = Path(folder) / "spec.json", Path(folder) / "costs.json"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        arguments = [
            STAGES,
            "--spec",
            str(path),
            "--vocabulary",
            str(vocabulary),
            "--repetitions",
            str(REPETITIONS),
            "--out",
            str(out),
        ]
        environment = {
            **ACCELERATORS[spec.cluster.accelerator].environment,
            PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": str(spec.parallel.threads),
        }
        _run(arguments, environment, out, "use a smaller micro-batch")
        return StageCosts.model_validate_json(out.read_text(encoding="utf-8"))


def _run(module: Sequence[str], environment: Mapping[str, str], out: Path, remedy: str) -> None:
    """Run a module with its arguments until it has written `out`.

    Raises MeasureError with the module's output, or after LONGEST seconds with a remedy.
    """
    command = [sys.executable, "-m", *module]
    try:
        process = subprocess.run(
            command, env={**os.environ, **environment}, check=False, capture_output=True, text=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        raise MeasureError(f"nothing was measured in {LONGEST:.0f} s; {remedy}") from None
    if process.returncode or not out.exists():
        # torchrun forwards all output of ranks, including errors, to its standard output; its own lines add nothing.
        lines = process.stdout.splitlines() or process.stderr.splitlines()
        output = "\n".join(f"    {line}" for line in lines[-SHOWN:])
        raise MeasureError(f"the process that measures ended with {process.returncode}; its output:\n{output}")
