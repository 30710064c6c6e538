"""Request to the kernel to end a process with its parent (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

VARIABLE = "HOLDFAST_PARENT"  # the parent's process id: the kernel does not report a death before the request
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent dies, if HOLDFAST_PARENT holds its process id."""
    if (parent := os.environ.get(VARIABLE)) is not None:
        die_with(int(parent), number)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent, given by its process id, dies or has died."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request
        os.kill(os.getpid(), number)


def lead_children() -> None:
    """Have the children of this process die with it, if it dies with its own parent."""
    if VARIABLE in os.environ:
        os.environ[VARIABLE] = str(os.getpid())
