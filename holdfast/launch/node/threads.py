"""State of a process's threads, as the kernel reports it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
