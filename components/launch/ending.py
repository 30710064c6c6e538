"""How the ranks of one node ended, and the one exit code that this makes.

torchrun itself ends with 1 whatever its ranks said; a restart policy that reads exit codes needs the cause.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from holdfast.components.spec.errors import ExitCode

FOLDER_VARIABLE = "HOLDFAST_ENDINGS"


def expect_ending() -> None:
    """Mark that this rank will leave its exit code: when it leaves none, it was killed."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):
            (Path(folder) / os.environ.get("RANK", "0")).with_suffix(".began").touch()


def record_ending(code: int) -> None:
    """Leave this rank's exit code where `holdfast.components.launch.torchrun` finds it, when it started this rank."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        leave_ending(Path(folder) / os.environ.get("RANK", "0"), code)


def leave_ending(path: Path, code: int) -> None:
    """Write an exit code to `path`, in whole or not at all."""
    with suppress(OSError):  # a full disk must not change the code; torchrun mostly sees it as well
        path.with_suffix(".unfinished").write_text(str(int(code)))
        path.with_suffix(".unfinished").rename(path)


def recorded_endings(folder: Path) -> list[int]:
    """The codes that the ranks left in `folder`."""
    return [int(path.read_text()) for path in folder.iterdir() if path.name.isdigit()]


def killed_ranks(folder: Path) -> int:
    """How many ranks began and left no code."""
    return sum(not path.with_suffix("").exists() for path in folder.glob("*.began"))


def as_exit_code(status: int) -> int:
    """An exit code as a shell reports it, from one as Python does (negative for a signal)."""
    return 128 - status if status < 0 else status


def root_cause(codes: Iterable[int]) -> int:
    """The code that explains the others: a permanent one first, then whatever is not a consequence of another's end."""
    failed = [code for code in codes if code != ExitCode.OK]
    if not failed:
        return ExitCode.OK
    consequences = (ExitCode.LOST_PEER, ExitCode.TERMINATED)
    return min(failed, key=lambda code: (code >= 128, code in consequences, code))
