"""A process that must not outlive its parent says so to the kernel (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

VARIABLE = "HOLDFAST_PARENT"  # the process id of the parent: the kernel tells nothing about a death before the request
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent dies, if it asked for it by its process id in HOLDFAST_PARENT."""
    if (parent := os.environ.get(VARIABLE)) is not None:
        die_with(int(parent), number)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent, whose process id is given, dies or has died."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), number)


def lead_children() -> None:
    """Ask the children of this process to die with it, if it was asked to die with its own parent."""
    if VARIABLE in os.environ:
        os.environ[VARIABLE] = str(os.getpid())
