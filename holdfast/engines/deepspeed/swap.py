"""Swap files on a local disk for DeepSpeed's optimizer state and, if configured, weights.

Each live rank has one folder, and all data read back is verified. DeepSpeed writes whole files past the page cache and
reuses a few buffers for all files. Loading and saving need all state together, so they map the files into memory.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from holdfast.runtime.exits import code_of
from holdfast.spec.errors import ExitCode, Problem, SpecError, UnhealthyNodeError

_NAME, _LOCK = "holdfast-swap-", "owner"


class SwapFiles:
    """The swap files of this rank, under `base`. First it removes the folders of dead ranks of this user, of any run,
    because no process reads them again. Raises SpecError for an unusable folder, UnhealthyNodeError for a failing disk,
    and OSError for a full one."""

    def __init__(self, base: str, run_id: str) -> None:
        self._owner: int | None = None
        self._sums: dict[str, bytes] = {}
        self._mapped: dict[str, torch.Tensor] = {}
        try:
            Path(base).mkdir(parents=True, exist_ok=True)
            with locked(Path(base) / f"{_NAME}lock-{os.getuid()}"):
                for folder in Path(base).glob(f"{_NAME}*/"):
                    with suppress(FileNotFoundError):  # a rank that ends removes its folder at any time
                        _remove_if_dead(folder)
                self.folder = Path(tempfile.mkdtemp(dir=base, prefix=f"{_NAME}{run_id}-"))
                try:
                    self._owner = _taken(self.folder / _LOCK)
                    os.close(os.open(self.folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
                except OSError:
                    self.close()
                    raise
        except OSError as error:
            if code_of(error) != ExitCode.UNEXPECTED:  # the disk or the memory is full, which may pass
                raise
            if error.errno == errno.EIO or (error.errno == errno.EROFS and _is_mounted(Path(base))):
                raise UnhealthyNodeError(f"{base}: the disk of parallel.offload_path is broken ({error})") from error
            remedy = (
                "use a folder on a local disk that this user may write to, on ext4 or xfs (cluster.volumes mounts one)"
            )
            raise SpecError([Problem("parallel.offload_path", base, f"cannot be used ({error})", remedy)]) from error

    def handle(self, handle: Any) -> Any:
        """DeepSpeed's handle, with verification of its writes and reads. DeepSpeed itself checks no result."""
        return _Checked(handle, self._sums)

    def mapped(self, path: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers of a swap file as a mapped tensor, not a copy."""
        if path not in self._mapped:
            size = Path(path).stat().st_size // dtype.itemsize
            self._mapped[path] = torch.from_file(path, shared=True, size=size, dtype=dtype)
        return self._mapped[path]

    def mapped_anew(self) -> None:
        """Drop the mappings, because DeepSpeed has written since."""
        self._mapped.clear()

    def require_as_written(self) -> None:
        """Raises UnhealthyNodeError if a mapped file holds other bytes than were written to it."""
        for path, numbers in self._mapped.items():
            _require(path, numbers, self._sums)

    def filled(self) -> None:
        """Flush the mapped files and record their checksums. DeepSpeed reads them past the page cache."""
        for path, numbers in self._mapped.items():
            with Path(path).open("rb") as file:
                os.fsync(file)
            self._sums[path] = _sum(numbers)

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None


class _Checked:
    """A wrapper of DeepSpeed's handle with verification."""

    def __init__(self, handle: Any, sums: dict[str, bytes]) -> None:
        self._handle, self._sums = handle, sums
        self._reads: list[tuple[str, torch.Tensor]] = []
        self._writes: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        """Start writing a whole file."""
        self._sums[path] = _sum(buffer)
        self._writes.append((path, buffer.nbytes))
        return int(self._handle.async_pwrite(buffer, path, offset))

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        """Start reading a whole file."""
        self._reads.append((path, buffer))
        return int(self._handle.async_pread(buffer, path, offset))

    def wait(self) -> int:
        """Wait for all started operations, which have succeeded. Returns their number. Raises OSError or
        UnhealthyNodeError."""
        count = int(self._handle.wait())
        for path, size in self._writes:
            if Path(path).stat().st_size < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        for path, buffer in self._reads:
            _require(path, buffer, self._sums)
        self._writes, self._reads = [], []
        return count


def _require(path: str, numbers: torch.Tensor, sums: dict[str, bytes]) -> None:
    if _sum(numbers) != sums[path]:
        raise UnhealthyNodeError(
            f"{path}: the disk of parallel.offload_path gives back other bytes than were written; it is full or broken"
        )


def _sum(numbers: torch.Tensor) -> bytes:
    return blake3(numbers.detach().view(torch.uint8).numpy().data).digest()


def _is_mounted(folder: Path) -> bool:
    """Whether a folder, or its nearest existing parent, is on a different disk from the system. The system's disk may
    be read-only by design, as in a container. The kernel makes a failing disk read-only."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return existing.stat().st_dev != Path("/").stat().st_dev


def _remove_if_dead(folder: Path) -> None:
    """Remove a folder of this user if its rank is dead. On a shared scratch disk, other users remove their own folders,
    and each user has a separate lock."""
    if folder.stat().st_uid == os.getuid() and (owner := _taken(folder / _LOCK)) is not None:
        os.close(owner)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when this process ends in any way."""
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _taken(path: Path) -> int | None:
    """Lock a file as a sign that this process lives. Returns its descriptor, which children do not inherit, or None if
    another process holds the lock."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
