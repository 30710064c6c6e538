"""Resources that all pytest processes share. The first process that needs one creates it."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, filled by `make`. After a failure, `make` runs again in an empty folder."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    shared.mkdir(exist_ok=True)
    with (shared / f"{name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        tries = lock.read().split()
        if tries[-1:] != ["made"]:
            folder = shared / f"{name}-{len(tries)}"
            folder.mkdir()
            lock.write("begun ")
            lock.flush()
            make(folder)
            lock.write("made ")
            return folder
        return shared / f"{name}-{len(tries) - 2}"
