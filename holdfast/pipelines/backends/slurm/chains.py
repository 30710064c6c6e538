"""Chains of Slurm jobs, from the names and comments of the jobs, which are their only record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.pipelines.backends.slurm import client
from holdfast.pipelines.backends.slurm.client import BatchJob
from holdfast.pipelines.backends.slurm.emit import PREFIX, job_name
from holdfast.pipelines.table import EDGES, FAN_OUT_START, START, SWEEP_EDGES, steps_from
from holdfast.steps import STEPS
from holdfast.steps.outcomes import EXIT_HANDLER


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

    def untold(self, told: Collection[str] = ()) -> list[str]:
        """The steps that are not known to have begun: they and all later ones are missing from its jobs and from
        `told`.

        A step waits for the success of the previous one.
        """
        if self.unfinished and not self.whole:  # its jobs are still being created
            return []
        steps = list(steps_from(START, SWEEP_EDGES if self.is_sweep else EDGES))
        last = max((place for place, step in enumerate(steps) if step in self.jobs or step in told), default=-1)
        return steps[last + 1 :]


def chains_of(keys: Sequence[str] = ()) -> list[Submitted]:
    """This user's chains, oldest first: all, or those of some keys.

    Without accounting, Slurm forgets the first jobs of a chain while the later ones run.
    """
    names = [job_name(key, step) for key in keys for step in STEPS]
    found: list[Submitted] = []
    for job in client.jobs_of(names):
        key, _, step = job.name.removeprefix(f"{PREFIX}-").rpartition("-")
        if not job.name.startswith(f"{PREFIX}-") or step not in STEPS or not key:
            continue
        called = job.comment.rpartition(" ")[2]  # empty where the accounting keeps no comments
        fitting = [one for one in found if one.key == key and step not in one.jobs]
        first = called.removeprefix(f"{key}-")
        if _begins(step, key, called, fitting):
            found.append(Submitted(key, job.id, {step: job}))
        elif mine := next((one for one in fitting if one.id == called or not called), None):
            mine.jobs[step] = job
        elif called.startswith(f"{key}-") and first.isdecimal():
            found.append(Submitted(key, int(first), {step: job}))
    return sorted(found, key=lambda one: one.first)


def _begins(step: str, key: str, called: str, fitting: Sequence[Submitted]) -> bool:
    """Whether a job is the first of a chain. The comment of a first job has no number yet."""
    if step not in (START, FAN_OUT_START):
        return False
    if called:
        return called == key
    return step == FAN_OUT_START or not any(FAN_OUT_START in one.jobs for one in fitting)
