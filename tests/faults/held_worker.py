"""A rank that computes no step above the number in the file HOLDFAST_TEST_HOLDS. So a test decides at which step of a
gang its nodes come and go. If the rank gets a stop request, it stops waiting and touches the file `stopped` next to
that file. While the number is below 0, all ranks but the first do not even rendezvous. Memory that a rank has used
stays mapped, so a rank with little memory would need no more. This rank therefore requests some from the kernel before
each step, and while it is held.
"""

import inspect
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from holdfast.rank import setup as rank_setup
from holdfast.rank import worker
from holdfast.rank.preemption import PreemptionSignal
from holdfast.telemetry import phases

MEMORY = 1 << 28  # bytes of address space only; they are never written


def main() -> None:
    """See `worker.main`."""
    file, train, meet = Path(os.environ["HOLDFAST_TEST_HOLDS"]), worker.train, rank_setup.join_gang

    def meet_when_let(*arguments: Any, **more: Any) -> None:
        while os.environ["RANK"] != "0" and int(file.read_text()) < 0:
            time.sleep(0.02)
        meet(*arguments, **more)

    def held(batches: Iterable[Any], leave: PreemptionSignal) -> Iterator[Any]:
        for step, rows in batches:
            phases.enter("save")  # a phase without a time limit: no watchdog reports it as a hang
            mmap.mmap(-1, MEMORY).close()
            while step >= int(file.read_text()) and not leave.wanted:
                mmap.mmap(-1, MEMORY).close()
                time.sleep(0.02)
            phases.enter("data")
            if leave.wanted:
                file.with_name("stopped").touch()
            yield step, rows

    def patient(*arguments: Any, **more: Any) -> None:
        bound = inspect.signature(train).bind(*arguments, **more)
        bound.arguments["batches"] = held(bound.arguments["batches"], bound.arguments["session"].leave)
        train(*bound.args, **bound.kwargs)

    worker.train, rank_setup.join_gang = patient, meet_when_let
    worker.main()
