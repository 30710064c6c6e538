"""A separate disk of a run that can be full: a file system in memory, in a mount namespace for the run's processes
only.

It requires root, or a kernel that allows user namespaces. The mount is invisible outside, and disappears with the last
process in the namespace, in any case.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Self

TOOLS = ("unshare", "nsenter", "mount")  # of util-linux
SIZE = "50%"  # of the memory; only written data take space
PAGE = 4096
OWN_USERS = ("--user", "--map-root-user")  # for users other than root
# Mounts, confirms it, and resizes until its standard input ends.
KEEPER = f"""mount -t tmpfs -o mode=700,size={SIZE} holdfast-chaos "$1" || exit 1
echo there
while read -r size; do
    if mount -o "remount,size=$size" "$1" 2>/dev/null; then echo done; else echo refused; fi
done"""
ENTER = 'cd "$1" && shift && exec "$@"'  # nsenter starts at the namespace's root


class Disk:
    """A disk at `folder` for processes whose command comes from `inside`. A context manager; the disk is initially
    empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._users, _ = _tried()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keeper = _keeper(self._users, self._folder)
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "there\n":
            _, message = self._keeper.communicate()
            raise OSError(f"{self._folder}: no file system can be mounted: {message.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # logs for a person to read later
            shutil.copytree(self.seen / "logs", self._folder / "logs", dirs_exist_ok=True)
        self._keeper.communicate()

    @property
    def seen(self) -> Path:
        """The folder, reachable from outside the namespace."""
        return Path(f"/proc/{self._keeper.pid}/root{self._folder}")

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, run inside the namespace with the disk."""
        users = ("--user", "--preserve-credentials") if self._users else ()
        prefix = ["nsenter", "--target", str(self._keeper.pid), "--mount", *users, "--", "sh", "-c", ENTER, "sh"]
        return [*prefix, str(Path.cwd()), *command]

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Make the disk full for the duration of the context."""
        size = 0
        while not self._resized(size := max(size + PAGE, self._used())):  # a process has written meanwhile
            pass
        try:
            yield
        finally:
            self._resized(SIZE)

    def _used(self) -> int:
        usage = os.statvfs(self.seen)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize

    def _resized(self, size: int | str) -> bool:
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.write(f"{size}\n")
        self._keeper.stdin.flush()
        return self._keeper.stdout.readline() == "done\n"


def refused() -> str:
    """Why such a disk is impossible here; empty if it is possible."""
    return _tried()[1]


@cache
def _tried() -> tuple[tuple[str, ...], str]:
    """The user options that `unshare` needs, and the reason if it does not work."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return (), f"a separate disk takes {' and '.join(missing)} of util-linux, on Linux"
    reason = ""
    for users in ((), OWN_USERS):
        with tempfile.TemporaryDirectory() as folder:
            output, reason = _keeper(users, Path(folder)).communicate()
        if output == "there\n":
            return users, ""
    return (), f"a separate disk takes root, or namespaces for users, which is not given here: {reason.strip()}"


def _keeper(users: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Start the process that holds a namespace with a file system at `folder`, until its standard input ends."""
    return subprocess.Popen(
        ["unshare", *users, "--mount", "--propagation", "private", "--", "sh", "-c", KEEPER, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
