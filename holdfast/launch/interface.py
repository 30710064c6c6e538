"""What a launcher promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.spec.cluster import Cluster
from holdfast.telemetry.events import in_words

NODE_RANK_VARIABLE = "HOLDFAST_NODE_RANK"  # names the number of a pod's node in its job
LEAVE_MARGIN = 15  # seconds from the end of a node's ranks to that of what they run in: a pod, a step, an actor


@dataclass(frozen=True)
class Job:
    """One launch of a distributed job: what every launcher and emitter starts from."""

    name: str  # a DNS-1035 label, the same for the same run and launch
    run_id: str
    launch: int
    command: Sequence[str]  # what torchrun runs in every process: "-m module arguments"
    processes: int  # on each node, one for each accelerator
    threads: int  # CPU threads of each process
    grace_seconds: float  # from SIGTERM to SIGKILL
    cluster: Cluster  # nodes, resources, placement, image, as the spec has them
    metrics_port: int | None = None  # at which the pod of rank 0 shows its figures
    environment: Mapping[str, str] = field(default_factory=dict)
    excluded_nodes: frozenset[str] = frozenset()  # names of nodes that failed too often
    leaving_nodes: frozenset[str] = frozenset()  # names of nodes that others are preferred to


@dataclass(frozen=True)
class Ending:
    """How a launch ended."""

    code: int
    log_tail: Sequence[str]  # the last lines that the ranks printed
    detail: str = ""  # which rank on which node, why, and where the log is, as far as the launcher knows
    blamed_nodes: frozenset[str] = frozenset()  # nodes that are suspected to be the cause
    rank: int | None = None  # that explains the ending, where the launcher knows it
    node: int | None = None  # in the job, that it is on
    attempt: int | None = None  # of that rank; None when it had not met the others
    elsewhere: bool = True  # whether the next launch can be given other nodes

    @property
    def retryable(self) -> bool:
        """Whether starting the gang again may succeed."""
        return self.code >= 128

    @property
    def reason(self) -> str:
        """The code in words."""
        return in_words(self.code)


def where_the_log_is(job: Job, ending: Ending) -> str:
    """What shows the log of the rank that explains an ending, for a person."""
    rank = (ending.node or 0) * job.processes if ending.rank is None else ending.rank
    which = f"--launch {job.launch}" if ending.attempt is None else f"--attempt {ending.attempt}"
    return f"its log: holdfast logs {job.run_id} --rank {rank} {which}"


class Launcher(Protocol):
    """Runs one launch at a time."""

    def only_one(self, run_id: str) -> AbstractContextManager[None]:
        """Be the only launcher of a run while in the context. Waits for another one to leave it."""

    def adopt(self, run_id: str, launch: int) -> bool:
        """Whether launch `launch` of the run goes on without a launcher, so that `run` may take it over. Whatever else
        of the run has lost its launcher is ended. Call it in `only_one`."""

    def run(self, job: Job) -> Ending:
        """Start the job, or take it over, and follow it to its end."""

    def stop(self) -> None:
        """Ask the running job to save and leave. Returns at once; from any thread, and fine when nothing runs."""
