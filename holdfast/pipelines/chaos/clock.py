"""A wall clock with an adjustable offset for the processes of a run.

Changing the machine's clock would require root and affect all processes. So the run's interpreters get a
`sitecustomize` that adds the offset in a file to `time.time`. Code that reads the clock another way gets the true time.
S3 requests are signed with the true time, as by a client that has corrected its clock.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "HOLDFAST_CHAOS_CLOCK"  # file with the offset
OFFSET = struct.Struct("d")  # seconds
CUSTOM = """import mmap, os, struct, time

def _jump(path, real=time.time, unpack=struct.Struct("d").unpack_from):
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    time.time = lambda: real() + unpack(offset)[0]
    time.time_ns = lambda: int(time.time() * 1e9)

_jump(os.environ["HOLDFAST_CHAOS_CLOCK"])
"""


class Clock:
    """The clock of a run's processes."""

    def __init__(self, folder: Path) -> None:
        """Create `folder`, which only this clock uses, with offset 0."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(CUSTOM)
        self._folder, self._file = folder, folder / "offset"
        if not self._file.exists():  # processes that survived an earlier run here may have mapped it
            self._file.write_bytes(OFFSET.pack(0.0))
        self.jump(0.0)

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """The additional variables of a process with the variables `before`."""
        paths = filter(None, (str(self._folder), before.get("PYTHONPATH")))
        return {VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(paths)}

    def jump(self, seconds: float) -> None:
        """Set the offset."""
        with self._file.open("r+b") as file:
            file.write(OFFSET.pack(seconds))
