"""A process that must not outlive its parent says so to the kernel (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

VARIABLE = "HOLDFAST_DIE_WITH_PARENT"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Be killed when the parent dies, if the local launcher asked for it by HOLDFAST_DIE_WITH_PARENT=1."""
    if os.environ.get(VARIABLE) != "1" or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent == 1 or os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)
