"""Reports of a rank to the watchdog of its node: heartbeat, stacks on demand, waits for other ranks."""

import faulthandler
import os
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holdfast.launch.exits import FOLDER_VARIABLE
from holdfast.launch.node.stacks import STACK_SIGNAL, STACKS
from holdfast.runtime import heartbeat
from holdfast.telemetry import phases
from holdfast.telemetry.phases import PHASES


def enable_watchdog() -> None:
    """Make this process visible to the watchdog of its node. Call it once, in the thread that trains."""
    folder = Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None
    if folder is not None:
        with suppress(OSError):
            # The C handler writes the file itself. It needs neither Python's lock nor a reader of a pipe.
            stacks = (folder / f"{os.getpid()}{STACKS}").open("wb", buffering=0)
            faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    phases.show_on(heartbeat.publish(folder, PHASES.index("data"), [PHASES.index("save")]))
    _report_collective_waits()


def _report_collective_waits() -> None:
    """Report every wait for a collective that goes through Python, because torch has no hook for it. Waits in C++,
    such as those of DDP's reducer, are the phase `communication`."""
    wait = dist.Work.wait

    @wraps(wait)
    def reported(self: dist.Work, *arguments: Any, **named: Any) -> Any:
        with heartbeat.here.waiting():
            return wait(self, *arguments, **named)

    dist.Work.wait = reported  # type: ignore[method-assign]
