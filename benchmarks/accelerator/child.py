"""A measurement in a child process with a time limit, and the modules that are imported before it is forked."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.accelerator.exactness import train_exactly
from benchmarks.accelerator.kernels import measure_kernels
from benchmarks.accelerator.locking import measure_locking
from benchmarks.accelerator.machine import check_health, describe_machine
from benchmarks.accelerator.memory import measure_memory
from benchmarks.accelerator.mfu import measure_mfu
from benchmarks.accelerator.request import Request
from benchmarks.accelerator.stall import measure_stall
from holdfast.launch.device import MEETING_VARIABLE

MEASURES: dict[str, Callable[[Request], None]] = {
    "train": train_exactly,
    "kernels": measure_kernels,
    "memory": measure_memory,
    "mfu": measure_mfu,
    "stall": measure_stall,
    "locking": measure_locking,
    "health": check_health,
    "machine": describe_machine,
}
MODULES = (
    "benchmarks._living",
    "blake3",
    "holdfast.checkpoint",
    "holdfast.engines.torch.engine",
    "holdfast.engines.weights",
    "holdfast.health.examine",
    "holdfast.planning",
    "holdfast.rank.measure.throughput",
    "holdfast.store",
    "torch.distributed.checkpoint",
    "torch.profiler",
)
TAIL = 4000  # characters of a failed measurement's output that are kept


def import_modules() -> None:
    """Import what the measurements need, so that a fork has it."""
    for module in MODULES:
        with suppress(Exception):  # the measurement that needs it reports it
            import_module(module)


def run_in_child(request: Request, folder: Path, seconds: float) -> dict[str, Any]:
    """The results of a measurement, with its time and exit code. After `seconds` it is killed.

    If it fails or is killed, `error` gives the reason and `output` the end of its output.
    """
    result, output = folder / "result.json", folder / "output"
    result.unlink(missing_ok=True)
    request = replace(request, result=str(result), seconds=seconds)
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_child(request, output)
    code = None
    while code is None and time.monotonic() - began < seconds:
        code = _exit_code(child)
        time.sleep(0.02)
    cut = code is None
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also its children, such as compilers
    if cut:
        os.waitpid(child, 0)
    outcome: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    outcome |= {"wall_s": round(time.monotonic() - began, 2), "exit": code}
    if cut:
        outcome["error"] = f"cut after {seconds:.0f} s"
    elif code != (-signal.SIGKILL if request.kill else 0):
        outcome["error"] = f"exit code {code}"
    if "error" in outcome:
        outcome["output"] = output.read_text(errors="replace")[-TAIL:]
    return outcome


def _run_child(request: Request, output: Path) -> None:
    """Run a measurement, and end this process."""
    code = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        meeting = f"{request.result}.meeting-{time.time_ns()}"
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", MEETING_VARIABLE: meeting}
        if request.fresh or torch.cuda._is_in_bad_fork():
            os.execv(
                sys.executable,
                [sys.executable, "-m", "benchmarks.accelerator", "--request", json.dumps(asdict(request))],
            )
        MEASURES[request.measure](request)
        code = 0
    except BaseException:  # noqa: BLE001 - the child never returns into the parent's code
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _exit_code(child: int) -> int | None:
    """The exit code of a child, or the negative signal; None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None
