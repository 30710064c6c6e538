"""Slurm as a backend (`holdfast.pipelines.backends.interface`).

A run is a chain of batch jobs, one for each step, connected by dependencies. Jobs of one run share their names, and
`singleton` runs jobs with one name one after another: two submissions of the same request never train concurrently.
"""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.launch.launches import avoided_nodes
from holdfast.pipelines.backends import capabilities
from holdfast.pipelines.backends.interface import (
    CANCELED,
    RUNNING,
    SUCCEEDED,
    RunStatus,
    StepStatus,
    ended_with,
    is_step,
    require_one_run,
)
from holdfast.pipelines.backends.rank_shell import RankShell
from holdfast.pipelines.backends.request import RunRequest
from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.client import BatchJob
from holdfast.pipelines.backends.slurm.emit import (
    PREFIX,
    Chain,
    folder_of,
    job_name,
    jobs_of,
    options_of,
    script_of,
    store_mark,
)
from holdfast.pipelines.backends.slurm.states import (
    NOT_KNOWN,
    state_of,
    status_of_outcome,
    step_of,
    trials_of,
    whole_state,
)
from holdfast.pipelines.paths import store_root
from holdfast.pipelines.table import (
    EDGES,
    FAN_OUT_START,
    SCRIPT_START,
    START,
    SWEEP_EDGES,
    edges_of,
    start_of,
    steps_from,
)
from holdfast.runtime.environment import store_url
from holdfast.runtime.logs import plain
from holdfast.runtime.output import CHUNK, LineCutter
from holdfast.spec import parse_spec
from holdfast.spec.errors import HoldfastError, MissingError
from holdfast.steps import STEPS
from holdfast.steps.jobs import outcomes_of
from holdfast.steps.outcomes import EXIT_HANDLER, Outcome
from holdfast.store import open_store

# Chains of Slurm jobs, from the names and comments of the jobs, which are their only record.


@dataclass(frozen=True)
class Submitted:
    """One submission as Slurm knows it: the jobs of a key with one first job."""

    key: str
    first: int  # id of its first job, which Slurm may have forgotten
    jobs: dict[str, BatchJob]  # by step, in the order of submission, without forgotten ones

    @property
    def id(self) -> str:
        """The chain's id: the key and the id of its first job."""
        return f"{self.key}-{self.first}"

    @property
    def unfinished(self) -> bool:
        """Whether any of its jobs may still change."""
        return any(job.unfinished for job in self.jobs.values())

    @property
    def is_sweep(self) -> bool:
        """Whether its job arrays are trials."""
        return "compare" in self.jobs

    @property
    def whole(self) -> bool:
        """Whether all of its jobs were created."""
        return EXIT_HANDLER in self.jobs

    def steps_without_jobs(self, reported: Collection[str] = ()) -> list[str]:
        """The steps after the last one that its jobs or `reported` contain; these are not known to have begun.

        A step waits for the success of the previous one.
        """
        if self.unfinished and not self.whole:  # its jobs are still being created
            return []
        steps = self._planned_steps()
        last = max(
            (position for position, step in enumerate(steps) if step in self.jobs or step in reported), default=-1
        )
        return steps[last + 1 :]

    def _planned_steps(self) -> list[str]:
        """The steps of its DAG, in order. Only its folder knows that it trains a script."""
        if self.is_sweep:
            return list(steps_from(START if START in self.jobs else SCRIPT_START, SWEEP_EDGES))
        for file in folder_of(self.key).glob("spec-*.yaml"):
            with suppress(HoldfastError, OSError):  # a spec of another version
                spec = parse_spec(file.read_text(encoding="utf-8"))
                if spec.train.script is not None:
                    return list(steps_from(start_of(spec), edges_of(spec)))
        return list(steps_from(START, EDGES))


def chains_of(keys: Sequence[str] = ()) -> list[Submitted]:
    """This user's chains, oldest first: all, or those of some keys.

    Without accounting, Slurm forgets the first jobs of a chain while the later ones run.
    """
    names = [job_name(key, step) for key in keys for step in STEPS]
    chains: list[Submitted] = []
    for job in client.jobs_of(names):
        key, _, step = job.name.removeprefix(f"{PREFIX}-").rpartition("-")
        if not job.name.startswith(f"{PREFIX}-") or step not in STEPS or not key:
            continue
        chain_id = job.comment.rpartition(" ")[2]  # empty where the accounting keeps no comments
        candidates = [chain for chain in chains if chain.key == key and step not in chain.jobs]
        first = chain_id.removeprefix(f"{key}-")
        if _begins(step, key, chain_id, candidates):
            chains.append(Submitted(key, job.id, {step: job}))
        elif match := next((chain for chain in candidates if chain.id == chain_id or not chain_id), None):
            match.jobs[step] = job
        elif chain_id.startswith(f"{key}-") and first.isdecimal():
            chains.append(Submitted(key, int(first), {step: job}))
    return sorted(chains, key=lambda one: one.first)


def _begins(step: str, key: str, called: str, fitting: Sequence[Submitted]) -> bool:
    """Whether a job is the first of a chain. The comment of a first job has no number yet."""
    if called:
        return called == key
    if step == SCRIPT_START:
        return not fitting
    if step not in (START, FAN_OUT_START):
        return False
    return step == FAN_OUT_START or not any(FAN_OUT_START in chain.jobs for chain in fitting)


POLL_SECONDS = 1.0
STORE_SECONDS = 10.0  # for a chain's records in the store
HALF_MADE_SECONDS = 60.0  # after which the submitter of an incomplete chain counts as dead


class Slurm:
    """The Slurm of this machine's commands, and this user's chains in it."""

    name = "slurm"
    capabilities = capabilities.SLURM

    def __init__(self, store: str = "") -> None:
        """`store`: URL of the store with the steps' outcomes."""
        self._url = store_root(store) if store else store_url()

    def objects(self, request: RunRequest) -> list[dict[str, Any]]:
        """The sbatch options and the script of each job. The ids of earlier jobs are examples."""
        return jobs_of(request)

    def submit(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Submit the jobs, unless a chain of this run is unfinished or has succeeded."""
        chain = Chain.of(request)
        self._url = chain.store
        if (existing := self._kept(chain.key)) is not None:
            status = self._status(existing)
            if status.unfinished or (status.state == SUCCEEDED and request.run_id):
                return status, False
        chain = replace(chain, excluded_nodes=_avoided_nodes(chain))
        chain.write()
        submitted = self._make(chain)
        oldest = _oldest(submitted)
        if oldest.id != submitted.id:  # a concurrent submission of the same request was first
            self._end(submitted)
            return self._status(oldest), False
        client.release(next(iter(submitted.jobs.values())).id)
        return self._status(submitted), True

    def status(self, run: str) -> RunStatus:
        """The status of a chain and its jobs."""
        return self._status(self._find(run))

    def logs(self, run: str, step: str = "", *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """The output of the jobs, from Slurm's log files."""
        cutters: dict[Path, LineCutter] = {}
        while True:
            chain = self._find(run)
            unfinished = chain.unfinished  # read first, so the last pass misses no line
            for name, file in _log_files(chain):
                if is_step(step, name):
                    cutter = cutters.setdefault(file, LineCutter())
                    yield from ((name, line) for line in _new_lines(file, cutter, whole=not unfinished))
            if not follow or not unfinished:
                break
            time.sleep(POLL_SECONDS)
        if not cutters:
            raise MissingError(
                f"{chain.id}: there is no log of {step or 'any step'} in {folder_of(chain.key)}: it has not begun, or "
                "HOLDFAST_HOME here is another folder than where it was submitted"
            )

    def cancel(self, run: str) -> tuple[RunStatus, bool]:
        """End a chain. Waiting jobs are removed, running ones save and exit, and the exit handler still runs."""
        chain = self._find(run)
        running = self._status(chain).unfinished
        if running:
            self._end(chain, keep=EXIT_HANDLER)
        return self._status(self._find(chain.id)), running

    def list(self) -> list[RunStatus]:
        """This user's chains, newest first."""
        return [self._status(chain, detailed=False) for chain in reversed(chains_of())]

    def rank_shell(self, shell: RankShell) -> Sequence[str]:
        """A step of the job that shares what the ranks have. All nodes see Python at the same path."""
        place = [f"--jobid={shell.scheduled_in('job')}", f"--nodelist={shell.process.node}"]
        options = ["--overlap", "--nodes=1", "--ntasks=1", *(["--pty"] if shell.terminal else [])]
        return ["srun", *place, *options, *shell.on_node(sys.executable)]

    def resume(self, request: RunRequest) -> tuple[RunStatus, bool]:
        """Submit the request again. A new chain follows a failed one and resumes its training."""
        return self.submit(request)

    def _make(self, chain: Chain) -> Submitted:
        """Submit the jobs of a chain, the first one held. If one is refused, all are removed."""
        job_ids: dict[str, int] = {}
        try:
            for step in chain.steps:
                job_ids[step] = client.sbatch(script_of(chain, step, job_ids), options_of(chain, step, job_ids))
        except BaseException:
            for number in job_ids.values():
                with suppress(HoldfastError):
                    client.cancel(number)
            raise
        return Submitted(
            chain.key,
            next(iter(job_ids.values())),
            {
                step: BatchJob(number, job_name(chain.key, step), "PENDING", "Dependency")
                for step, number in job_ids.items()
            },
        )

    def _kept(self, key: str) -> Submitted | None:
        """The valid chain of a key: an unfinished one, otherwise the newest.

        Incomplete chains of a dead submitter are removed.
        """
        end = time.monotonic() + HALF_MADE_SECONDS
        while True:
            chains = chains_of([key])
            incomplete = [chain for chain in chains if chain.unfinished and not chain.whole]
            if not incomplete:
                break
            if time.monotonic() > end:
                for chain in incomplete:
                    self._end(chain)
            time.sleep(POLL_SECONDS)
        unfinished = [chain for chain in chains if chain.unfinished]
        return unfinished[0] if unfinished else chains[-1] if chains else None

    def _end(self, chain: Submitted, keep: str = "") -> None:
        for step, job in reversed(chain.jobs.items()):  # last jobs first, so that nothing starts meanwhile
            if step == keep or not job.unfinished:
                continue
            if state_of(job) == RUNNING:
                with suppress(HoldfastError):  # it may be ending by itself
                    client.forbid_requeue(job.id)
                client.ask_to_leave(job.id)
            else:
                client.cancel(job.id)

    def _find(self, wanted: str) -> Submitted:
        matches = [chain for chain in chains_of() if wanted and (chain.id == wanted or chain.key.startswith(wanted))]
        matches = [chain for chain in matches if chain.id == wanted] or matches
        matches = [chain for chain in matches if chain.key.endswith(f"-{store_mark(self._url)}")] or matches
        require_one_run(wanted, (chain.key for chain in matches))
        if not matches:
            raise MissingError(
                f"{wanted!r}: Slurm knows no run of yours with that id; `holdfast runs --backend slurm` shows all that "
                "it knows, and `holdfast show` what the store has"
            )
        return next((chain for chain in matches if chain.unfinished), matches[-1])

    def _status(self, chain: Submitted, *, detailed: bool = True) -> RunStatus:
        is_incomplete = all(job.id != chain.first for job in chain.jobs.values()) or chain.steps_without_jobs()
        outcomes = _outcomes(chain.id, self._url) if detailed or is_incomplete else {}
        forgotten = [status_of_outcome(outcome) for outcome in outcomes.values() if outcome.step not in chain.jobs]
        statuses = (status for step, job in chain.jobs.items() for status in _steps(chain, step, job, outcomes))
        recorded_steps = {outcome.step for outcome in outcomes.values()}
        missing = (StepStatus(step, CANCELED, None, NOT_KNOWN) for step in chain.steps_without_jobs(recorded_steps))
        steps = tuple(sorted((*forgotten, *statuses, *missing), key=lambda one: one.name == EXIT_HANDLER))
        state = whole_state(steps)
        failed = (
            next((status for status in steps if status.state == state), None)
            if state not in (RUNNING, SUCCEEDED)
            else None
        )
        message = f"{failed.name}: {failed.error}" if failed is not None and failed.error else ""
        link = f"squeue --jobs {','.join(str(job.id) for job in chain.jobs.values())}"
        code = ended_with(state, steps)
        return RunStatus(self.name, chain.id, chain.id, state, link, message, steps if detailed else (), code)


def _log_files(chain: Submitted) -> Iterator[tuple[str, Path]]:
    """The step, or its trial, and the file of each log."""
    folder, job_ids = folder_of(chain.key), {step: job.id for step, job in chain.jobs.items()}
    forgotten = {}
    for file in folder.glob("*.log"):
        step, _, job_id = file.stem.partition("_")[0].rpartition("-")
        if step in STEPS and step not in job_ids and chain.first <= int(job_id) < max(job_ids.values()):
            forgotten[step] = int(job_id)
    numbers = {**dict(sorted(forgotten.items(), key=lambda one: one[1])), **job_ids}
    for step, number in numbers.items():
        yield from ((step, file) for file in folder.glob(f"{step}-{number}.log"))
        for file in sorted(folder.glob(f"{step}-{number}_*.log"), key=lambda file: (len(file.name), file.name)):
            task = file.stem.rpartition("_")[2]
            yield f"{step}-{task}" if chain.is_sweep else step, file


def _steps(chain: Submitted, step: str, job: BatchJob, outcomes: dict[str, Outcome]) -> Iterator[StepStatus]:
    if chain.is_sweep and STEPS[step].per_trial:
        yield from trials_of(step, job, outcomes)
    else:
        yield step_of(step, job, outcomes.get(step))


def _outcomes(chain: str, url: str) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in outcomes_of(chain, "", store=url)}


def _oldest(mine: Submitted) -> Submitted:
    """The valid chain among concurrent ones of one run: the first that becomes complete."""
    end = time.monotonic() + HALF_MADE_SECONDS
    while True:
        oldest = next((chain for chain in chains_of([mine.key]) if chain.unfinished), mine)
        if oldest.id == mine.id or oldest.whole:
            return oldest
        if time.monotonic() > end:  # singleton still lets only one of them run at a time
            return mine
        time.sleep(POLL_SECONDS)


def _avoided_nodes(chain: Chain) -> frozenset[str]:
    if not chain.request.run_id:  # no launch of it is known
        return frozenset()
    with suppress(HoldfastError):  # the jobs find the store themselves
        store = open_store(chain.store, deadline=STORE_SECONDS)
        return avoided_nodes(store, chain.request.run_id, chain.spec.cluster)
    return frozenset()


def _new_lines(file: Path, cutter: LineCutter, *, whole: bool) -> Iterator[str]:
    """The new lines of a file; with `whole`, also a last line without its end."""
    with file.open("rb") as content:
        content.seek(cutter.size)
        while data := content.read(CHUNK):
            yield from _texts(cutter.add(data))
    if whole:
        yield from _texts(cutter.rest())


def _texts(lines: Iterator[bytes]) -> Iterator[str]:
    return (plain(text) for line in lines for text in line.decode(errors="replace").splitlines() or [""])
