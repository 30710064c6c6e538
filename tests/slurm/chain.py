"""Runs of a small spec on a real Slurm, and the state of their jobs."""

import sys
from pathlib import Path
from typing import Any

from tests.slurm.cluster import SlurmCluster
from tests.whole import small
from tests.whole.submitting import Submitter, until

# For runs on this machine: as many processes as on the two nodes of the cluster, so the same plan and the same bits.
LIKE_TWO_NODES = ("--set", "parallel.processes=2", "--set", "training.micro_batch=2")


class Place(Submitter):
    """A folder that the nodes see: corpus, spec, store, logs."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, *overrides: str, held: int | None = None, **sections: dict[str, Any]
    ) -> None:
        """`held`: training waits at this step until `release`."""
        self.slurm = slurm
        environment = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
        environment |= {} if held is None else small.held(folder, held)
        super().__init__(folder, folder / "home", {**environment, "HOLDFAST_BACKEND": "slurm"}, overrides, **sections)

    def let(self, steps: int) -> None:
        """Let a held training compute up to this step."""
        small.hold(self.folder, steps)

    def release(self) -> None:
        """Let a held training compute to its end."""
        small.hold(self.folder, sys.maxsize)

    def wait(self, run: str, seconds: float = 600) -> dict[str, Any]:
        """The status of a run once it has ended."""
        until(lambda: not self._queued(), seconds)
        return self.status(run)

    def logs(self, run: str = "") -> str:
        """All output, for the message of a failed test."""
        files = sorted((self.folder / "home").glob("slurm/*/*.log")) + sorted((self.folder / "home").glob("logs/*/*"))
        return "\n".join(f"--- {path}\n{path.read_text()[-6000:]}" for path in files if path.is_file()) + run

    def _queued(self) -> str:
        return self.slurm.ask("squeue", "--noheader", "--states=PENDING,RUNNING,COMPLETING,SUSPENDED,REQUEUED")
