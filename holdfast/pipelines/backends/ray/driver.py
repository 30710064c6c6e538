"""The driver of a Ray job: the runner over Ray tasks. `python -m holdfast.pipelines.backends.ray.driver --job ID`.

Steps are Ray tasks. Train is a process next to the driver, and its launcher makes the gang. A stopped job saves and
exits, the exit handler always runs, and the driver ends with the code of the failed step. The process is small. It runs
on the head of the cluster, whose loss ends everything anyway.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from holdfast.launch.ray.launcher import connect
from holdfast.launch.ray.node import start
from holdfast.pipelines.backends.ray.emit import SPEC
from holdfast.pipelines.backends.ray.task import LEAVE_SECONDS, MODULE, Task
from holdfast.pipelines.runner import Execution, Handle, Runner, plan
from holdfast.pipelines.step_process import StepProcess
from holdfast.runtime.environment import store_url
from holdfast.runtime.logs import configure_logging
from holdfast.spec import ExitCode, Spec, parse_spec
from holdfast.spec.engine_text import restore_environment
from holdfast.spec.json_parsing import parse_json_object
from holdfast.steps import STEPS
from holdfast.steps.jobs import outcomes_of, recorder
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome

log = logging.getLogger("holdfast.ray")

LOOK_SECONDS = 0.3  # seconds between checks of tasks and their placement


class RayTask:
    """An execution as a Ray task. See Handle."""

    leave_seconds = LEAVE_SECONDS + 10

    def __init__(self, task: Task, steps: RaySteps) -> None:
        self.task, self._steps = task, steps
        self._leaving = False
        self._result: dict[str, Any] = {}

    def poll(self) -> int | None:
        """See Handle."""
        code = self._poll()
        if code is not None:
            self.task.room.free()
            self._steps.tasks.remove(self)
        return code

    def _poll(self) -> int | None:
        task = self.task
        if task.reference is None and self._leaving:
            return int(ExitCode.TERMINATED)
        if task.reference is None or not ray.wait([task.reference], timeout=0)[0]:
            queued = any(other.task.has_room for other in self._steps.tasks if other is not self)
            if not (reason := task.start_if_possible(queued=queued)):
                return None
            log.error("%s", reason)
            task.cancel(force=True)
            now, code = time.time(), int(ExitCode.UNSCHEDULABLE)
            self._steps.record(Outcome(task.step, os.getpid(), now, now, code, reason))
            return code
        try:
            code, result = ray.get(task.reference)
        except RayError as error:
            if self._leaving:
                return int(ExitCode.TERMINATED)
            log.error(
                "%s was lost permanently: %s", task.label, next(iter(str(error).splitlines()), type(error).__name__)
            )
            return int(ExitCode.KILLED)
        if code == ExitCode.OK and result:
            self._result = parse_json_object(result, f"the result of {task.step}")
        return int(code)

    def result(self) -> dict[str, Any]:
        """See Handle."""
        return self._result

    def stop(self, *, force: bool) -> None:
        """See Handle."""
        self._leaving = True
        self.task.cancel(force=force)


class ExitHandler(StepProcess):
    """The exit handler. The driver keeps its outcome, because the spec may name no store."""

    def __init__(self, steps: RaySteps, *arguments: Any) -> None:
        self._steps, self._outcome = steps, Outcome(EXIT_HANDLER, os.getpid(), time.time())
        steps.record(self._outcome)
        super().__init__(*arguments)

    def poll(self) -> int | None:
        """See Handle."""
        if (code := super().poll()) is not None:
            self._outcome.exit_code, self._outcome.ended = code, time.time()
            self._steps.record(self._outcome)
        return code


class RaySteps:
    """Steps as Ray tasks. See StepBackend. Train and the exit handler are processes on the driver's machine."""

    width = 0

    def __init__(self, spec: Spec, text: str, store: str, job: str) -> None:
        self._spec, self._text, self._store, self._job = spec, text, store, job
        self.tasks: list[RayTask] = []  # unfinished tasks

    def start(self, execution: Execution) -> Handle:
        """See StepBackend."""
        step = execution.step
        arguments = [f"--job={self._job}", *([f"--store={self._store}"] if self._store else []), *execution.arguments]
        if step == EXIT_HANDLER:
            return ExitHandler(self, step, step, self._text, arguments, start_step)
        if STEPS[step].launches:
            return StepProcess(step, step, self._text, arguments, start_step)
        label = f"{step} {execution.part}" if execution.part else step
        self.tasks.append(task := RayTask(Task(step, label, self._spec, self._text, arguments), self))
        return task

    def wait(self, _handles: Sequence[Handle]) -> None:
        """See StepBackend."""
        if references := [task.task.reference for task in self.tasks if task.task.reference is not None]:
            ray.wait(references, timeout=LOOK_SECONDS)
        else:
            time.sleep(LOOK_SECONDS)

    def retries(self, step: str) -> int:
        """The retries of a process. Ray itself retries tasks."""
        return self._spec.cluster.retries.budget if STEPS[step].launches else 0

    def record(self, outcome: Outcome) -> None:
        """See StepBackend."""
        if keep := recorder(self._job):
            keep(self._store or store_url(self._spec), outcome)

    def outcomes(self) -> list[Outcome]:
        """See StepBackend."""
        return outcomes_of(self._job, self._text, store=self._store)


def start_step(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a step on this machine."""
    return start(["-m", MODULE, *arguments], {})


def main(argv: Sequence[str]) -> int:
    """Run the DAG of the spec in HOLDFAST_SPEC. Returns the exit code of the job."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else 'driver'}", allow_abbrev=False)
    parser.add_argument("--job", required=True, help="what Ray calls this job")
    parser.add_argument("--store", default="", help="root of the store; default: the spec's, or HOLDFAST_STORE")
    parser.add_argument("--salt", default="", help="anything here makes another run of the same inputs")
    parser.add_argument("--replan", default="false", help="continue although the plan has changed")
    arguments = parser.parse_args(argv)
    configure_logging()
    restore_environment()
    text = os.environ[SPEC]
    parameters = {"salt": arguments.salt, "replan": arguments.replan}
    spec = parse_spec(text)
    runner = Runner(plan(spec), RaySteps(spec, text, arguments.store, arguments.job), parameters)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runner.request_stop())
    connect()
    return runner.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
