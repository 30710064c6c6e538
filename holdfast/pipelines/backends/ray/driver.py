"""The driver of a job of Ray: it walks the DAG, `python -m holdfast.pipelines.backends.ray.driver --job ID`.

Steps are tasks of Ray; train is a process beside the driver, whose launcher makes the gang. Promises that a job which
is asked to stop saves and leaves, that the exit handler runs whatever happened before, and that the driver ends with
the code of the step that failed. It is a thin process: where it stands, the head of the cluster, everything ends with
the cluster anyway.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from holdfast.launch.ray.launcher import connect
from holdfast.launch.ray.node import printed_by, start
from holdfast.pipelines.backends.interface import SKIPPED
from holdfast.pipelines.backends.ray.emit import SPEC
from holdfast.pipelines.backends.ray.task import LEAVE_SECONDS, MODULE, Task
from holdfast.pipelines.table import edges_of, inputs_of, start_of, steps_from
from holdfast.runtime.environment import store_url
from holdfast.runtime.logs import configure_logging
from holdfast.runtime.outcomes import EXIT_HANDLER, Outcome
from holdfast.runtime.temporary import temporary_folder
from holdfast.spec import ExitCode, Spec, parse_spec
from holdfast.spec.engine_text import restore_environment
from holdfast.spec.json_parsing import parse_json_object
from holdfast.steps import PARAMETERS, STEPS, producer_of
from holdfast.store.jobs import outcomes_of, recorder

log = logging.getLogger("holdfast.ray")

POLL_SECONDS = 1.0
LOOK_SECONDS = 0.3  # between two looks at tasks and at the room for them


class Walk:
    """One execution of the DAG."""

    def __init__(self, spec: Spec, text: str, store: str, job: str, given: dict[str, str]) -> None:
        """`given`: the parameters of the DAG that a step may take, as words."""
        self._spec, self._text, self._store, self._job, self._given = spec, text, store, job, given
        self._results: dict[str, dict[str, Any]] = {}
        self.stopping = threading.Event()

    def run(self) -> int:
        """Every step to its end, and the exit handler; the code of the first that failed."""
        edges = edges_of(self._spec)
        steps = list(steps_from(start_of(self._spec), edges))
        code, failed = int(ExitCode.OK), ""
        for step in steps:
            before = next((edge for edge in edges if edge.after == step and edge.before in steps), None)
            if before and before.when and (said := self._first(before.before)) != before.when:
                self._skip(step, f"{before.before} says {said}")
                break
            items = self._results[before.before][STEPS[before.before].items] if before and before.each else None
            code = ExitCode.TERMINATED if self.stopping.is_set() else self._step(step, steps, items)
            if code != ExitCode.OK:
                failed = step
                break
        self._notify(code, failed)
        return int(code)

    def _step(self, step: str, steps: Sequence[str], items: Sequence[str] | None) -> int:
        """Run a step, or all of its parts; its code."""
        words = self._words(step, steps)
        if STEPS[step].launches:
            return self._beside(step, words)
        item = STEPS[step].item.replace("_", "-")
        tasks = {f"{step} {one}": [*words, f"--{item}={one}"] for one in items} if items is not None else {step: words}
        return self._tasks(step, tasks)

    def _words(self, step: str, steps: Sequence[str]) -> list[str]:
        words = [f"--job={self._job}", *([f"--store={self._store}"] if self._store else [])]
        for name in inputs_of(step, steps):
            if name == STEPS[step].item:
                continue
            value = self._given[name] if name in PARAMETERS else self._results[producer_of(name)][name]
            words.append(f"--{name.replace('_', '-')}={value}")
        return words

    def _tasks(self, step: str, tasks: dict[str, list[str]]) -> int:
        """Run tasks of Ray at once; the code of the first that failed, after which the others are ended."""
        waiting = [Task(step, label, self._spec, self._text, words) for label, words in tasks.items()]
        code, deadline = int(ExitCode.OK), 0.0
        while waiting:
            left = []
            for task in waiting:
                queued = any(other.has_room for other in waiting if other is not task)
                ended = self._ended(task, leaving=bool(deadline), queued=queued)
                code = code or ended or int(ExitCode.OK)
                if ended is None:
                    left.append(task)
                else:
                    task.room.free()
            waiting = left
            if waiting and not deadline and (code or self.stopping.is_set()):
                deadline = time.monotonic() + LEAVE_SECONDS + 10
                for task in waiting:
                    task.cancel(force=False)
            elif waiting and deadline and time.monotonic() > deadline:
                deadline = time.monotonic() + LEAVE_SECONDS
                for task in waiting:
                    task.cancel(force=True)
            if references := [task.reference for task in waiting if task.reference is not None]:
                ray.wait(references, timeout=LOOK_SECONDS)
            elif waiting:
                time.sleep(LOOK_SECONDS)
        return code

    def _ended(self, task: Task, *, leaving: bool, queued: bool) -> int | None:
        """The code of a task that has ended, whose result is kept; None for one that has not."""
        if task.reference is None and leaving:
            return int(ExitCode.TERMINATED)
        if task.reference is None or not ray.wait([task.reference], timeout=0)[0]:
            if not (why := task.go_on(queued=queued)):
                return None
            log.error("%s", why)
            task.cancel(force=True)
            self._keep(Outcome(task.step, os.getpid(), time.time(), time.time(), int(ExitCode.UNSCHEDULABLE), why))
            return int(ExitCode.UNSCHEDULABLE)
        try:
            code, result = ray.get(task.reference)
        except RayError as error:
            if self.stopping.is_set():
                return int(ExitCode.TERMINATED)
            log.error("%s was lost for good: %s", task.label, next(iter(str(error).splitlines()), type(error).__name__))
            return int(ExitCode.KILLED)
        if code == ExitCode.OK and result:
            self._results[task.step] = parse_json_object(result, f"the result of {task.step}")
        return int(code)

    def _beside(self, step: str, words: Sequence[str]) -> int:
        """Run a step in a process of this machine, again when it was killed; its code."""
        for left in range(self._spec.cluster.retries.budget, -1, -1):
            code = self._once(step, words)
            if code != ExitCode.KILLED or self.stopping.is_set() or not left:
                break
            log.warning("%s was killed; it begins again", step)
        return code

    def _once(self, step: str, words: Sequence[str]) -> int:
        with temporary_folder() as folder:
            file, output = Path(folder, "spec.yaml"), Path(folder, "result.json")
            file.write_text(self._text, encoding="utf-8")
            process = start(["-m", MODULE, step, f"--spec={file}", f"--output={output}", *words], {})
            watcher = threading.Thread(target=self._ask_to_leave, args=(process,), daemon=True)
            watcher.start()
            for lines in printed_by(process):
                for line in lines.splitlines():
                    print(f"[{step}] {line}", flush=True)  # noqa: T201 - the log of the job
            code = process.wait()
            if code == 0 and output.is_file():
                self._results[step] = parse_json_object(output.read_bytes(), str(output))
        return 128 - code if code < 0 else code

    def _ask_to_leave(self, process: subprocess.Popen[bytes]) -> None:
        """Pass it on once that somebody asked this driver to stop. (Ray asks all processes of the job's machine.)"""
        while process.poll() is None:
            if self.stopping.wait(POLL_SECONDS):
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                return

    def _first(self, step: str) -> str:
        """The word that a step gave."""
        return str(self._results[step][STEPS[step].outputs[0]])

    def _skip(self, step: str, why: str) -> None:
        log.info("%s is left out: %s", step, why)
        now = time.time()
        self._keep(Outcome(step, os.getpid(), now, now, int(ExitCode.OK), result=f"{SKIPPED}: {why}"))

    def _keep(self, outcome: Outcome) -> None:
        """Leave what no step can say of itself."""
        if keep := recorder(self._job):
            keep(self._store or store_url(self._spec), outcome)

    def _notify(self, code: int, failed: str) -> None:
        """Tell how it ended. What fails here changes nothing."""
        status = "succeeded" if code == ExitCode.OK else "cancelled" if ExitCode.is_interruption(code) else "failed"
        reason = ""
        if failed:
            outcomes = outcomes_of(self._job, self._text, store=self._store)
            reason = next((one.reason for one in reversed(outcomes) if one.step == failed and one.reason), "")
            reason = f"{failed}: {reason or f'exit code {code}'}"
        words = [*self._words(EXIT_HANDLER, ()), f"--status={status}", f"--message={reason}"]
        told = Outcome(EXIT_HANDLER, os.getpid(), time.time())
        self._keep(told)
        told.exit_code = self._once(EXIT_HANDLER, words)
        told.ended = time.time()
        self._keep(told)


def main(argv: Sequence[str]) -> int:
    """Walk the DAG of the spec in HOLDFAST_SPEC; the code of the job."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else 'driver'}", allow_abbrev=False)
    parser.add_argument("--job", required=True, help="what Ray calls this job")
    parser.add_argument("--store", default="", help="root of the store; default: the spec's, or HOLDFAST_STORE")
    parser.add_argument("--salt", default="", help="anything here makes another run of the same inputs")
    parser.add_argument("--replan", default="false", help="go on although the plan has changed")
    arguments = parser.parse_args(argv)
    configure_logging()
    restore_environment()
    text = os.environ[SPEC]
    given = {"salt": arguments.salt, "replan": arguments.replan}
    walk = Walk(parse_spec(text), text, arguments.store, arguments.job, given)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: walk.stopping.set())
    connect()
    return walk.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
