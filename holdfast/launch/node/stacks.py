"""Stacks of each thread of a rank: on a signal, the rank writes them to a file, in C and without another process.

This needs neither Python's lock nor a reader of a pipe. `rank.hang_reporting` sets it up. Also the state of a process's
threads, as the kernel reports it.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

STACK_SIGNAL = signal.SIGUSR1
STACKS = ".stacks"
STACK_SECONDS, STARVED_SECONDS = 2.0, 60.0  # see `stacks_of`
MAX_STACKS = 256 * 2**10  # of each rank
WORKING = frozenset("RD")  # states of a thread, in the kernel's letters: see `states_of`


def states_of(pid: int) -> Iterator[str]:
    """The state of each thread of a process, main thread first. R runs or is runnable, D waits for a disk, S sleeps, T
    is stopped. Empty if it cannot be read. Reads only as many threads as the caller consumes: a rank that computes
    shows it in its first thread."""
    with suppress(OSError):
        yield _state(Path(f"/proc/{pid}/stat"))
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with suppress(OSError):
                yield _state(Path(f"/proc/{pid}/task/{thread}/stat"))


def has_working_child(pid: int) -> bool:
    """Whether a child process works, or one of its descendants: a compiler does."""
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, thread.read_text().split()):
                if not WORKING.isdisjoint(states_of(child)) or has_working_child(child):
                    return True
    return False


def blocking(pid: int, number: int) -> set[str]:
    """The threads of a process that block a signal: by their own mask, or while they handle it."""
    blocking_threads, threads = set[str](), list[str]()
    with suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    for thread in threads:
        with suppress(OSError):  # it has just ended
            status = Path(f"/proc/{pid}/task/{thread}/status").read_text(encoding="utf-8", errors="replace")
            blocked = re.search(r"^SigBlk:\s*([0-9a-f]+)", status, re.MULTILINE)
            if blocked is not None and int(blocked[1], 16) & 1 << (number - 1):
                blocking_threads.add(thread)
    return blocking_threads


def _state(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


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
