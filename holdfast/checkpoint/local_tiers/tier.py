"""A local tier on one node: its folder, the space left there, and the removal of unused folders.

A folder belongs to one life of a run: its name has the run id and a token of the run's first attempt. A run that was
deleted and begun anew therefore finds nothing of its former life.
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from blake3 import blake3
from pydantic import BaseModel, Field

from holdfast.checkpoint.attempts import read_attempt
from holdfast.spec.errors import NoSpaceError
from holdfast.store import Store
from holdfast.store.file import FileStore

log = logging.getLogger("holdfast.checkpoint")

VARIABLE = "HOLDFAST_MEMORY_DIR"  # a tmpfs; without it, a folder of this user in /dev/shm
STALE_SECONDS = {"memory": 3600.0, "disk": 24 * 3600.0}  # time without a write after which another run removes a folder
SPARE = 256 * 2**20  # bytes of memory that stay free for the ranks
_LOCK = ".lock"
_CGROUPS = Path("/sys/fs/cgroup")


class Tier(BaseModel, extra="forbid", frozen=True):
    """One local tier of a run, on this node."""

    name: Literal["memory", "disk"]
    folder: str  # folder of this run and life
    every: int = Field(ge=1)  # steps

    def store(self, writer: int) -> FileStore:
        """The store of one writer's copies. Each writer has a separate store, so that its packs are known to be its
        own."""
        return FileStore(Path(self.folder) / writer_folder(writer))

    def writers(self) -> list[int]:
        """The writers whose copies may be here."""
        with suppress(FileNotFoundError):
            names = [entry.name for entry in Path(self.folder).iterdir()]
            return sorted(int(name[1:]) for name in names if name.startswith("w") and name[1:].isdigit())
        return []


def writer_folder(writer: int) -> str:
    """The name of the folder of one writer."""
    return f"w{writer:05d}"


def life_of(store: Store, run_id: str) -> str:
    """The token of this life of a run. It changes when the run's attempts are deleted and the run begins anew."""
    first = read_attempt(store, run_id, 1)
    return blake3(f"{store.url}\0{first.get('nonce')}\0{first['claimed']}".encode()).hexdigest(8)


def memory_base() -> Path:
    """The folder in memory that all runs of this user share on this node. Raises PermissionError where another user
    made it."""
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    return make_folder(Path("/dev/shm"), f"holdfast-{os.getuid()}")  # noqa: S108 - checked


def make_folder(base: Path, name: str) -> Path:
    """A folder below `base` that only this user may enter. Raises PermissionError where another user made it."""
    base.mkdir(parents=True, exist_ok=True)
    folder = base / name
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: nothing is kept there")
    folder.chmod(0o700)
    return folder


class TierLock:
    """A lock that marks a folder as in use, for as long as this process lives."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def end(self) -> None:
        """Release the lock."""
        with suppress(OSError):
            os.close(self._descriptor)


def remove_stale(base: Path, own: str, seconds: float) -> None:
    """Remove the folders of other runs that no process holds and that had no write for `seconds`."""
    for folder in _folders(base):
        if folder.name == own:
            continue
        with suppress(OSError):
            descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > seconds:
                    log.info("removing %s: no run has used it for a while", folder)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def touch(folder: str) -> None:
    """Record a write to a folder."""
    with suppress(OSError):
        os.utime(Path(folder) / _LOCK)


def require_room(tier: Tier, size: int) -> None:
    """Raises NoSpaceError when `size` more bytes do not fit into the folder or, in memory, into what this process may
    take. Data in a tmpfs counts as memory of its writer's container."""
    free, limit = shutil.disk_usage(tier.folder).free, tier.folder
    if tier.name == "memory":
        for available, limit_name in _memory_left():
            if available - SPARE < free:
                free, limit = max(0, available - SPARE), limit_name
    if size > free:
        raise NoSpaceError(
            f"checkpoint.{tier.name}: {size} bytes do not fit into the {free} bytes that are left of {limit}; nothing "
            "more is kept there in this attempt"
        )


def _memory_left() -> Iterator[tuple[int, str]]:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        yield int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024, "this machine"
    for group in _groups():
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit - used + int(statistics.get("inactive_file", 0)), f"the memory limit of {group}"


def _groups() -> Iterator[Path]:
    """The control groups that this process is in, the innermost first."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = _CGROUPS / own.removeprefix("0::").strip().lstrip("/")
    while group.is_relative_to(_CGROUPS):
        yield group
        group = group.parent


def _folders(base: Path) -> list[Path]:
    with suppress(OSError):
        return [entry for entry in base.iterdir() if entry.is_dir() and not entry.is_symlink()]
    return []
