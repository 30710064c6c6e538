"""A step as a Ray task, on any node with free resources."""

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
LEAVE_SECONDS = 60.0  # for a step to exit after SIGTERM


class LostError(Exception):
    """The step's process was killed. Ray starts it again, if necessary on another node."""


def run(step: str, label: str, spec: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run a step to its end and print its output behind `[label]`. Returns its exit code and its result as JSON."""
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
            raise LostError(f"{label}: the process was killed: out of memory, or ended by a user")
        return (128 - code if code < 0 else code), output.read_text() if output.is_file() else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill it after LEAVE_SECONDS."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Task:
    """A step, or one part of it, as a Ray task: it waits for resources and runs.

    When its node, worker or process is lost, Ray runs it again once there are resources, within
    `cluster.retries.budget`.
    """

    def __init__(self, step: str, label: str, spec: Spec, text: str, arguments: Sequence[str]) -> None:
        """`label`: prefix of its output lines; `text`: the spec as the step reads it."""
        self.label, self.step = label, step
        self.reference: Any = None  # to the result of `run`, once it is placed
        self.has_room = False  # at the last check
        self._pending_timeout_minutes = spec.cluster.pending_timeout_minutes
        self._bundle, self._call = bundle(step, spec), (step, label, text, list(arguments))
        self._budget = spec.cluster.retries.budget
        self.room = GangReservation(label, self._bundle, patience=self._pending_timeout_minutes * 60)

    def start_if_possible(self, *, queued: bool) -> str:
        """Start the task once it has resources. Returns the reason if its wait has expired, otherwise an empty string.

        `queued`: other parts of the step run, and this one only waits for them.
        """
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
        """Ask the task to exit, or kill it."""
        if self.reference is not None:
            ray.cancel(self.reference, force=force)


def bundle(step: str, spec: Spec) -> dict[str, float]:
    """The resources of a step on its node, by Ray's names; memory in bytes."""
    resources = resources_of(STEPS[step], spec)
    amounts = {"CPU": float(amount(resources.cpu)), "memory": float(amount(resources.memory))}
    if resources.accelerators and resources.accelerator == ACCELERATORS[spec.cluster.accelerator].resource:
        amounts[RESOURCES[spec.cluster.accelerator]] = float(resources.accelerators)
    return amounts
