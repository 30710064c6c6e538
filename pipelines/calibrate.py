"""Measuring this machine for the planner: all ranks in processes of their own, as a launch would start them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.components.launch.accelerators import ACCELERATORS
from holdfast.components.spec.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.components.planning.calibration import Calibration

MODULE = "holdfast.components.train.calibrate"
LONGEST = 1800.0  # seconds; two cores take about one minute
SHOWN = 15  # lines of what the ranks printed


class CalibrationError(HoldfastError):
    """The ranks that measure ended without a result."""


def calibrate(ranks: int, kind: str = "cpu", steps: int = 5) -> Calibration:
    """Measure with `ranks` ranks on accelerators of `kind`, `steps` steps of each layout. Raises CalibrationError with
    what the ranks said."""
    from holdfast.components.planning.calibration import read

    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        path = Path(folder) / "calibration.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", MODULE,
            "--out", str(path), "--accelerator", kind, "--steps", str(steps),
        ]  # fmt: skip
        environment = {
            **os.environ, **ACCELERATORS[kind].environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        try:
            ended = subprocess.run(
                command, env=environment, check=False, capture_output=True, text=True, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            raise CalibrationError(f"{ranks} ranks did not end in {LONGEST:.0f} s; use fewer: --ranks") from None
        if ended.returncode or not path.exists():
            told = [line for line in ended.stderr.splitlines() if line.startswith("[rank")] or ended.stderr.splitlines()
            said = "\n".join(f"    {line}" for line in told[-SHOWN:])
            raise CalibrationError(f"the ranks that measure ended with {ended.returncode}; they said:\n{said}")
        return read(path)
