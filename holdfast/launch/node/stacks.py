"""Stacks of each thread of a rank: on a signal, the rank writes them to a file, in C and without another process.

This needs neither Python's lock nor a reader of a pipe. `rank.hang_reporting` sets it up.
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
MAX_STACKS = 256 * 2**10  # of each rank


def stacks_of(
    folder: Path, signalers: Mapping[int, Callable[[int], None]], starved_seconds: float = STARVED_SECONDS
) -> dict[int, bytes]:
    """The stacks of each process that can write them, by process id; each has a file in `folder`.

    `signalers`: process id → function that sends it a signal. Waits STACK_SECONDS for all, and `starved_seconds` for
    one that gets no core.
    """
    files = {pid: folder / f"{pid}{STACKS}" for pid in signalers}
    files = {pid: file for pid, file in files.items() if file.exists()}  # otherwise the signal would end it
    always = {pid: blocking(pid, STACK_SIGNAL) for pid in files}
    for pid in files:
        signalers[pid](STACK_SIGNAL)
    start = time.monotonic()
    while pending := [pid for pid, file in files.items() if not _has_written(pid, file, always[pid])]:
        starved = any(next(states_of(pid), "") == "R" for pid in pending)
        if time.monotonic() - start >= (starved_seconds if starved else STACK_SECONDS):
            break
        time.sleep(0.05)
    stacks = dict[int, bytes]()
    for pid, file in files.items():
        with suppress(OSError), file.open("rb") as stack_file:
            stacks[pid] = stack_file.read(MAX_STACKS)
    return stacks


def _has_written(pid: int, file: Path, always: set[str]) -> bool:
    """Whether a process has written all of its stacks: without a core, that takes long. Any thread may write them, and
    the kernel blocks the signal there meanwhile. In the threads `always`, it was blocked before."""
    with suppress(OSError):
        return file.stat().st_size > 0 and blocking(pid, STACK_SIGNAL) <= always
    return False
