"""Measuring what the stages of a pipeline cost on this machine: in a process of its own, which ends with this one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.components.launch.accelerators import ACCELERATORS
from holdfast.components.launch.orphan import VARIABLE as PARENT
from holdfast.components.spec.errors import HoldfastError, Problem, SpecError

if TYPE_CHECKING:
    from holdfast.components.planning.stages import StageCosts
    from holdfast.components.spec import Spec

MODULE = "holdfast.components.train.stage_costs"
LONGEST = 1800.0  # seconds
REPETITIONS = 7
SHOWN = 15  # lines of what the process printed


class MeasureError(HoldfastError):
    """The process that measures ended without a result."""


def stage_costs(spec: Spec, vocabulary: int) -> StageCosts:
    """Measure the parts of a spec's stages on this machine. Raises SpecError for one without a pipeline, and
    MeasureError with what the process said."""
    from holdfast.components.planning.stages import StageCosts

    if spec.parallel.pipeline == 1:
        what, remedy = "has no stages that could be balanced", "add --set parallel.pipeline=2, or more"
        raise SpecError([Problem("parallel.pipeline", 1, what, remedy)])
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        path, out = Path(folder) / "spec.json", Path(folder) / "costs.json"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        command = [
            sys.executable, "-m", MODULE, "--spec", str(path), "--vocabulary", str(vocabulary),
            "--repetitions", str(REPETITIONS), "--out", str(out),
        ]  # fmt: skip
        environment = {
            **os.environ, **ACCELERATORS[spec.cluster.accelerator].environment, PARENT: str(os.getpid()),
            "OMP_NUM_THREADS": str(spec.parallel.threads),
        }  # fmt: skip
        try:
            ended = subprocess.run(
                command, env=environment, check=False, capture_output=True, text=True, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            raise MeasureError(f"the stages were not measured in {LONGEST:.0f} s; use a smaller micro-batch") from None
        if ended.returncode or not out.exists():
            said = "\n".join(f"    {line}" for line in ended.stderr.splitlines()[-SHOWN:])
            raise MeasureError(f"the process that measures ended with {ended.returncode}; it said:\n{said}")
        return StageCosts.model_validate_json(out.read_text(encoding="utf-8"))
