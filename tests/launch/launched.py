"""A launch on this machine, run until nothing of it is left."""

from contextlib import closing
from pathlib import Path

from holdfast.launch import GangExit, Job, LocalLauncher


def launched(folder: Path, job: Job) -> GangExit:
    """The ending of a launch, once no process of it is left and all its output is in `folder`/logs."""
    with closing(LocalLauncher(folder / "logs")) as launcher:
        return launcher.run(job)
