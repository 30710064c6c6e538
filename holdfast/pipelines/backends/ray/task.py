"""A step as a task of Ray, on whichever node has room for it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from holdfast.launch.accelerators import ACCELERATORS
from holdfast.launch.ray.launcher import RESOURCES
from holdfast.launch.ray.node import address, start
from holdfast.launch.ray.placement_group import GangReservation, options_of
from holdfast.pipelines.backends.pods import resources_of
from holdfast.runtime.output import printed_by
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import Spec
from holdfast.spec.cluster import amount
from holdfast.steps import STEPS

MODULE = "holdfast.pipelines.backends.ray.step"
LEAVE_SECONDS = 60.0  # for a step that was asked to leave


class LostError(Exception):
    """The step's process was killed: Ray starts it again, elsewhere if it has to."""


def run(step: str, label: str, spec: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run a step to its end, printing what it prints behind `[label]`: its exit code and its result, as JSON."""
    with temporary_folder() as folder:
        file, output = Path(folder, "spec.yaml"), Path(folder, "result.json")
        file.write_text(spec, encoding="utf-8")
        print(f"[{label}] begins on {address()}", flush=True)  # noqa: T201
        process = start(["-m", MODULE, step, f"--spec={file}", f"--output={output}", *arguments], {})
        try:
            for lines in printed_by(process):
                for line in lines.splitlines():
                    print(f"[{label}] {line}", flush=True)  # noqa: T201 - Ray passes it on to the driver
            code = process.wait()
        finally:
            end(process)
        if code == -signal.SIGKILL:
            raise LostError(f"{label}: the process was killed: out of memory, or somebody ended it")
        return (128 - code if code < 0 else code), output.read_text() if output.is_file() else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """See to it that a process has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Task:
    """A step, or one part of it, as a task of Ray: it waits for room, and runs. When its node, its worker or its
    process is lost, Ray runs it again, within `cluster.retries.budget`, once there is room."""

    def __init__(self, step: str, label: str, spec: Spec, text: str, arguments: Sequence[str]) -> None:
        """`label`: what is printed before its lines; `text`: the spec as the step reads it."""
        self.label, self.step = label, step
        self.reference: Any = None  # to what `run` gives, once there was room
        self.has_room = False  # when somebody looked last
        self._pending_timeout_minutes = spec.cluster.pending_timeout_minutes
        self._bundle, self._call = bundle(step, spec), (step, label, text, list(arguments))
        self._budget = spec.cluster.retries.budget
        self.room = GangReservation(label, self._bundle, patience=self._pending_timeout_minutes * 60)

    def go_on(self, *, queued: bool) -> str:
        """Start it once there is room, or say why nobody waits any more. `queued`: other parts of the step run, and it
        only waits its turn."""
        self.has_room = self.room.is_ready(queued=queued)
        if self.has_room:
            if self.reference is None:
                retried = {"max_retries": self._budget, "retry_exceptions": [LostError] if self._budget else False}
                options = {**options_of(self._bundle), **retried, "scheduling_strategy": self.room.place()}
                self.reference = ray.remote(run).options(name=self.label, **options).remote(*self._call)
        elif self.room.is_expired:
            limit = f"cluster.pending_timeout_minutes ({self._pending_timeout_minutes:g})"
            return f"given up after {limit}: {self.room.shortfall()}"
        return ""

    def cancel(self, *, force: bool) -> None:
        """Ask it to leave, or kill it."""
        if self.reference is not None:
            ray.cancel(self.reference, force=force)


def bundle(step: str, spec: Spec) -> dict[str, float]:
    """What a step takes of its node, by Ray's names; memory in bytes."""
    wanted = resources_of(STEPS[step], spec)
    found = {"CPU": float(amount(wanted.cpu)), "memory": float(amount(wanted.memory))}
    if wanted.accelerators and wanted.accelerator == ACCELERATORS[spec.cluster.accelerator].resource:
        found[RESOURCES[spec.cluster.accelerator]] = float(wanted.accelerators)
    return found
