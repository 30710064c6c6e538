"""Phases of a rank as ranges of a profiler: of torch's in a trace, and of NVTX for Nsight Systems.

A range has the name of its phase after `holdfast.`. No range begins unless a profiler is requested.
"""

from __future__ import annotations

import logging
import os
import threading

import torch

from holdfast.telemetry.phases import Phase, RangeMarker

PREFIX = "holdfast."
NVTX_VARIABLE = "HOLDFAST_NVTX"  # 1: the phases of a rank with an NVIDIA GPU are NVTX ranges

log = logging.getLogger("holdfast.train")


def trace_ranges() -> RangeMarker:
    """Ranges in a trace of torch's profiler. A range belongs to a thread, so phases that begin in another thread than
    that of this call are part of the range before them."""
    thread, current = threading.get_ident(), None

    def mark(phase: Phase | None) -> None:
        nonlocal current
        if threading.get_ident() != thread:
            return
        if current is not None:
            current.__exit__(None, None, None)
        current = None if phase is None else torch.profiler.record_function(PREFIX + phase)
        if current is not None:
            current.__enter__()

    return mark


def nvtx_ranges() -> RangeMarker:
    """NVTX ranges of the process. Any thread may end one."""
    current = None

    def mark(phase: Phase | None) -> None:
        nonlocal current
        if current is not None:
            torch.cuda.nvtx.range_end(current)
        current = None if phase is None else torch.cuda.nvtx.range_start(PREFIX + phase)

    return mark


def requested_ranges(device: torch.device) -> RangeMarker | None:
    """NVTX ranges if HOLDFAST_NVTX is 1 and this torch is built for NVIDIA GPUs, else None."""
    if os.environ.get(NVTX_VARIABLE, "") in ("", "0"):
        return None
    if device.type != "cuda" or torch.version.cuda is None:
        log.warning("%s is set, and NVTX ranges need an NVIDIA GPU; there are none", NVTX_VARIABLE)
        return None
    return nvtx_ranges()
