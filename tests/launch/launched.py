"""A launch of this machine, run to its very end."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from holdfast.launch import Ending, Job, LocalLauncher


def launched(folder: Path, job: Job) -> Ending:
    """How it ended, once nothing of it is left, and all that it printed is kept (in `folder`/logs)."""
    with closing(LocalLauncher(folder / "logs")) as launcher:
        return launcher.run(job)
