"""Runs on the KFP server: their status, the logs of their steps, and cancellation.

A run is named by KFP's id or Holdfast's run id, by the beginning of either, or by the name that the UI shows.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast.pipelines.backends.interface import (
    CANCELED,
    FAILED,
    PENDING,
    SUCCEEDED,
    StepStatus,
    is_step,
    require_one_run,
    step_called,
)
from holdfast.pipelines.backends.kubeflow.connection import Server
from holdfast.pipelines.backends.kubeflow.pod_logs import PodLogs
from holdfast.pipelines.backends.kubeflow.records import Row, Tasks
from holdfast.pipelines.backends.kubeflow.submit import CONTAINS, UNFINISHED, end, in_namespace, named
from holdfast.runtime.exits import code_in
from holdfast.runtime.logs import plain
from holdfast.spec.errors import MissingError
from holdfast.steps import STEPS

POLL_SECONDS = 2.0
_PART = re.compile(r"[0-9a-f-]{3,35}")  # the beginning of an id
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def find_run(server: Server, wanted: str) -> Any:
    """The run that `wanted` names; the newest if there are several. Raises MissingError."""
    runs = server.runs
    if _UUID.fullmatch(wanted):
        return server.ask(runs.run_service_get_run, run_id=wanted)
    matches = [
        run
        for run in server.every(
            runs.run_service_list_runs, "runs", filter=named(wanted, CONTAINS), **in_namespace(server)
        )
        if wanted and (wanted in (run.display_name, *run.display_name.split()) or _run_id(run).startswith(wanted))
    ]
    require_one_run(wanted, (_run_id(run) for run in matches if _run_id(run).startswith(wanted)))
    if not matches and _PART.fullmatch(wanted):
        matches = [
            run
            for run in server.every(runs.run_service_list_runs, "runs", **in_namespace(server))
            if str(run.run_id).startswith(wanted)
        ]
        require_one_run(wanted, (run.run_id for run in matches))
    if not matches:
        raise MissingError(
            f"{wanted!r}: no run on {server.host} has that id or name; `holdfast run` prints both, and the UI lists "
            "all runs"
        )
    newest = max(matches, key=lambda run: (run.created_at, run.run_id))
    return server.ask(runs.run_service_get_run, run_id=newest.run_id)  # a listing omits the steps


def _run_id(run: Any) -> str:
    """Holdfast's id of a run, from its display name (see `RunRequest.name`); without an id, the second word of the
    name.
    """
    return str([*run.display_name.split(), "", ""][1])


def state_of(run: Any) -> str:
    """The state of a run in one word. KFP reports FAILED for a canceled run; its history shows the cancellation."""
    state = str(run.state or UNFINISHED[0]).replace("RUNTIME_STATE_UNSPECIFIED", "PENDING")
    earlier = [str(entry.state or "") for entry in run.state_history or () if str(entry.state or "") != state]
    return CANCELED if state == FAILED and earlier[-1:] == ["CANCELING"] else state


def steps_of(run: Any) -> list[StepStatus]:
    """The steps that have begun, in the order of the DAG. KFP lists all nodes of a workflow; this selects the steps."""
    tasks = Tasks(run)
    names = tasks.names()
    sweep = any(step_called(name) != name for name in names)
    statuses = []
    for step in STEPS:
        trial_names = [name for name in names if step_called(name) == step]
        for name in sorted(trial_names, key=lambda one: (len(one), one)):  # the trials of a sweep, by number
            shown_name = f"{name}-1" if sweep and STEPS[step].per_trial and name == step else name
            row = tasks.row(name)
            if row is not None:
                statuses.append(_step(shown_name, row, tasks.pods(name)))
    return statuses


def _step(name: str, row: Row, pods: tuple[str, ...]) -> StepStatus:
    seconds = None if row.started is None else (row.ended or time.time()) - row.started
    state = row.state or PENDING
    seconds = seconds if row.state else None  # a node that never began
    return StepStatus(name, state, seconds, row.error, pods, 0 if state == SUCCEEDED else code_in(row.error))


def cancel(server: Server, wanted: str) -> tuple[Any, bool]:
    """End the run that `wanted` names. Returns the run and whether it was still running."""
    run = find_run(server, wanted)
    return run, state_of(run) in UNFINISHED and end(server, run.run_id)


def logs(
    server: Server,
    wanted: str,
    step: str = "",
    *,
    follow: bool = False,
    pause: Callable[[float], None] = time.sleep,
    pods: Callable[[str], Iterable[str]] = lambda _: (),
) -> Iterator[tuple[str, str]]:
    """Yield (step, line) of everything that KFP has of the steps, or only of `step`; with `follow`, until the run has
    ended.

    `pods`: the known names of the pods of a run. KFP's own follow mode does not work, so each poll reads the whole log
    and yields only the new part.
    """
    byte_counts: dict[str, int] = {}  # bytes for each pod
    run = find_run(server, wanted)
    source, answer = PodLogs(server, run.run_id, pods(run.run_id)), ""
    while True:
        steps, missing = [step_status for step_status in steps_of(run) if is_step(step, step_status.name)], False
        for step_status in steps:
            for pod in step_status.pods:
                try:
                    content = source.read(pod)
                except MissingError as error:
                    answer, missing = str(error), True
                    continue
                for line in _new_lines(
                    content, pod, byte_counts, whole=not follow or step_status.state not in UNFINISHED
                ):
                    yield step_status.name, line
        if not follow or state_of(run) not in UNFINISHED:
            break
        pause(POLL_SECONDS)
        run = server.ask(server.runs.run_service_get_run, run_id=run.run_id)
        if missing:  # steps that have begun since report the names of their pods
            source.learn(pods(run.run_id))
    if not byte_counts:
        subject = f"step {step}" if step else "any step"
        raise MissingError(
            f"{run.display_name}: there is no log of {subject}: it has not begun, or its pod is gone and KFP keeps no "
            f"logs; `holdfast show --steps` has the steps{f' (the answer was: {answer})' if answer else ''}"
        )


def _new_lines(content: bytes, pod: str, shown: dict[str, int], *, whole: bool) -> Iterator[str]:
    """The new lines of a pod's log; the last one only if it is `whole` or terminated."""
    new = content[shown.get(pod, 0) :]
    if not whole:
        new = new[: new.rfind(b"\n") + 1]
    shown[pod] = shown.get(pod, 0) + len(new)
    for line in new.decode(errors="replace").splitlines():
        yield plain(line)
