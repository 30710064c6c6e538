"""Ray as a backend (`holdfast.pipelines.backends.interface`).

A run is a job of the Ray Jobs API, named after the run and a number. Ray refuses a second job with one name, so
concurrent submissions of the same request make one job.
"""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.interface import (
    CANCELED,
    FAILED,
    RUNNING,
    SKIPPED,
    SUCCEEDED,
    RunStatus,
    StepStatus,
    ended_with,
    require_one_run,
)
from holdfast.pipelines.backends.rank_shell import RankShell
from holdfast.pipelines.backends.ray.client import Jobs, RayJob
from holdfast.pipelines.backends.ray.emit import PREFIX, RayOrder, store_mark
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.paths import store_root
from holdfast.runtime.environment import store_url
from holdfast.runtime.logs import plain
from holdfast.spec.errors import ExitCode, MissingError
from holdfast.steps.jobs import outcomes_of
from holdfast.steps.outcomes import Outcome
from holdfast.telemetry.event_base import in_words

POLL_SECONDS = 2.0
_NAME = re.compile(rf"{PREFIX}-(?P<key>[0-9a-z]+-[0-9a-z]+)-(?P<number>[1-9][0-9]*)")
# Ray puts a prefix before the output of a task: (run pid=12, ip=10.0.0.1).
_LINE = re.compile(r"^(?:\x1b\[\d+m)?(?:\([^)]*\))?(?:\x1b\[0m)? ?\[(?P<step>[a-z]+)(?: [^\]]*)?\] ?(?P<line>.*)$")


class Ray:
    """The Ray cluster with the Jobs API at an address."""

    name = "ray"
    capabilities = capabilities.RAY

    def __init__(self, store: str = "", endpoint: str = "") -> None:
        """`store`: URL of the store with the steps' outcomes; `endpoint`: of the Jobs API."""
        self._url = store_root(store) if store else store_url()
        self._jobs = Jobs(endpoint)

    def objects(self, request: RunRequest) -> list[dict[str, Any]]:
        """The request that `submit` would send to the Jobs API."""
        order = RayOrder.of(request)
        name = order.submission_id(1)
        return [
            {
                "submission_id": name,
                "entrypoint": order.entrypoint(name),
                "runtime_env": order.runtime_env(),
                "metadata": order.metadata(),
            }
        ]

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Submit a job, unless one of this run is unfinished or has succeeded."""
        order = RayOrder.of(request)
        jobs = self._known(order.key)
        last = next((job for job in jobs if job.unfinished), jobs[-1] if jobs else None)
        if last is not None and (last.unfinished or (last.state == SUCCEEDED and request.run_id)):
            return self._status(last), False
        name = order.submission_id(_number(jobs[-1]) + 1 if jobs else 1)
        created = self._jobs.submit(name, order.entrypoint(name), order.runtime_env(), order.metadata())
        return self._status(self._find(name)), created

    def status(self, run: str) -> RunStatus:
        """The status of a job and its steps."""
        return self._status(self._find(run))

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """The output of the steps, as the driver forwards it."""
        position = 0  # characters
        while True:
            job = self._find(run)
            text = self._jobs.logs(job.id)[position:]
            complete = text if not job.unfinished else text[: text.rfind("\n") + 1]
            position += len(complete)
            for line in complete.splitlines():
                match = _LINE.match(line)
                step_name, output = (match["step"], match["line"]) if match else ("driver", line)
                if step in ("", step_name):
                    yield step_name, plain(output)
            if not follow or not job.unfinished:
                return
            time.sleep(POLL_SECONDS)

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """Stop a job. Its training saves and exits, and the exit handler still runs."""
        job = self._find(run)
        if job.unfinished:
            self._jobs.stop(job.id)
        return self._status(self._find(job.id)), job.unfinished

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """Raises MissingError: Ray starts no terminal on a node."""
        place = shell.process
        raise MissingError(
            f"rank {place.rank} of run {shell.run_id}: Ray cannot enter a node; log in to it yourself: it is process "
            f"{place.pid} on the node {place.node} of {self._jobs.address}"
        )

    def resume(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Submit the request again. A new job follows a failed one and resumes its training."""
        return self.submit(request)

    def list(self) -> list[RunStatus]:
        """Holdfast's jobs on the cluster, newest first."""
        return [self._status(job, detailed=False) for job in reversed(self._known())]

    def _known(self, key: str = "") -> Sequence[RayJob]:
        """Holdfast's jobs, or those of a key, in the order of submission."""
        jobs = [job for job in self._jobs.all() if (match := _NAME.fullmatch(job.id)) and key in ("", match["key"])]
        return sorted(jobs, key=_number) if key else jobs

    def _find(self, wanted: str) -> RayJob:
        matches = {job: _NAME.fullmatch(job.id) for job in self._known()}
        keys = {job: match["key"] for job, match in matches.items() if match}
        candidates = [job for job in keys if wanted == job.id] or [
            job for job in keys if wanted and (keys[job].startswith(wanted) or job.name == wanted)
        ]
        suffix = f"-{store_mark(self._url)}"
        candidates = [job for job in candidates if keys[job].endswith(suffix)] or candidates
        require_one_run(wanted, (keys[job] for job in candidates))
        if not candidates:
            raise MissingError(
                f"{wanted!r}: the Ray at {self._jobs.address} knows no such run; `holdfast runs --backend ray` shows "
                "all that it knows, and `holdfast show` what the store has"
            )
        return max(candidates, key=lambda one: (one.unfinished, _number(one)))

    def _status(self, job: RayJob, *, detailed: bool = True) -> RunStatus:
        outcomes = outcomes_of(job.id, "", store=self._url) if detailed else []
        steps = tuple(_step(outcome, job.unfinished) for outcome in outcomes)
        state = (
            CANCELED
            if job.state == "STOPPED" or (job.state == FAILED and ExitCode.is_interruption(job.code))
            else job.state
        )
        failed = next((step for step in steps if step.state in (FAILED, CANCELED)), None)
        message = ""
        if state == FAILED:
            message = f"{failed.name}: {failed.error}" if failed else job.message
        code = ended_with(state, steps)
        if code is None and not job.unfinished:
            code = job.code or None
        link = f"{self._jobs.address}/#/jobs/{job.id}"
        return RunStatus(self.name, job.id, job.id, state, link, message, steps, code)


def _number(job: RayJob) -> int:
    match = _NAME.fullmatch(job.id)
    return int(match["number"]) if match else 0


def _step(outcome: Outcome, unfinished: bool) -> StepStatus:
    """The status of a step from its outcome."""
    end = outcome.ended
    seconds = (end or time.time()) - outcome.started if end or unfinished else None
    if end is None:
        return StepStatus(outcome.name, RUNNING if unfinished else FAILED, seconds, "" if unfinished else "was killed")
    if outcome.exit_code:
        reason = outcome.reason.splitlines()[0] if outcome.reason else in_words(outcome.exit_code)
        state = CANCELED if ExitCode.is_interruption(outcome.exit_code) else FAILED
        return StepStatus(outcome.name, state, seconds, reason, exit_code=outcome.exit_code)
    if outcome.result.startswith(f"{SKIPPED}:"):
        return StepStatus(outcome.name, SKIPPED.upper(), seconds, outcome.result.partition(": ")[2], exit_code=0)
    return StepStatus(outcome.name, SUCCEEDED, seconds, exit_code=0)
