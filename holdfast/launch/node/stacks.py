"""Where each thread of a rank is, on demand: told a signal, the rank writes it into a file, by itself and in C.

Neither Python's lock nor a pipe that somebody reads is needed for that (`train.hang_reporting` sets it up).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.launch.node.threads import blocking, states_of

STACK_SIGNAL = signal.SIGUSR1
STACKS = ".stacks"
STACK_SECONDS, STARVED_SECONDS = 2.0, 60.0  # see `stacks_of`
MAX_STACKS = 256 * 2**10  # bytes of a rank


def stacks_of(
    folder: Path, asked: Mapping[int, Callable[[int], None]], starved_seconds: float = STARVED_SECONDS
) -> dict[int, bytes]:
    """What each process that can writes, by its id; in `folder` each has its file. `asked`: what sends a signal to it.
    Waits STACK_SECONDS for all of them, and `starved_seconds` for one that gets no core."""
    files = {pid: folder / f"{pid}{STACKS}" for pid in asked}
    files = {pid: file for pid, file in files.items() if file.exists()}  # else the signal would end it, unheard
    always = {pid: blocking(pid, STACK_SIGNAL) for pid in files}
    for pid in files:
        asked[pid](STACK_SIGNAL)
    begun = time.monotonic()
    while late := [pid for pid, file in files.items() if not _has_written(pid, file, always[pid])]:
        starved = any(next(states_of(pid), "") == "R" for pid in late)
        if time.monotonic() - begun >= (starved_seconds if starved else STACK_SECONDS):
            break
        time.sleep(0.05)
    found = dict[int, bytes]()
    for pid, file in files.items():
        with suppress(OSError), file.open("rb") as written:
            found[pid] = written.read(MAX_STACKS)
    return found


def _has_written(pid: int, file: Path, always: set[str]) -> bool:
    """Whether a process has written its stacks, all of them: one without a core is at it for long. Any of its threads
    may be the one that does, and the kernel blocks the signal there meanwhile; in those that are `always` named, it was
    blocked before."""
    with suppress(OSError):
        return file.stat().st_size > 0 and blocking(pid, STACK_SIGNAL) <= always
    return False
