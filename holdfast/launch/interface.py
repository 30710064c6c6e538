"""Interface of launchers: job, exit of its gang, and protocol."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from holdfast.spec.cluster import Cluster
from holdfast.telemetry.event_base import in_words

NODE_RANK_VARIABLE = "HOLDFAST_NODE_RANK"  # names the number of a pod's node in its job
LEAVE_MARGIN = 15  # seconds between the end of a node's ranks and that of their pod, step or actor
UNSAVED = "the ranks were killed before they had saved within checkpoint.grace_seconds"  # in reasons of stopped steps


@dataclass(frozen=True)
class Job:
    """One launch of a distributed job: the input of every launcher and emitter."""

    name: str  # a DNS-1035 label, the same for the same run and launch
    run_id: str
    launch: int
    command: Sequence[str]  # what torchrun runs in every process: "-m module arguments"
    processes: int  # on each node, one for each accelerator
    threads: int  # CPU threads of each process
    grace_seconds: float  # from SIGTERM to SIGKILL
    cluster: Cluster  # nodes, resources, placement and image from the spec
    _: KW_ONLY
    metrics_port: int | None = None  # port at which the pod of rank 0 serves its metrics
    environment: Mapping[str, str] = field(default_factory=dict)
    excluded_nodes: frozenset[str] = frozenset()  # names of nodes that failed too often
    leaving_nodes: frozenset[str] = frozenset()  # names of nodes to avoid if others are available


@dataclass(frozen=True)
class GangExit:
    """How the gang of a launch ended, as its launcher reports it. `launch.exits` has the records that it comes from."""

    code: int
    log_tail: Sequence[str]  # the last lines that the ranks printed
    detail: str = ""  # rank, node, reason and place of the log, as far as the launcher knows them
    blamed_nodes: frozenset[str] = frozenset()  # nodes that are suspected as the cause
    rank: int | None = None  # the rank that explains the ending, if the launcher knows it
    node: int | None = None  # number of that rank's node in the job
    attempt: int | None = None  # of that rank; None if it had not met the other ranks
    elsewhere: bool = True  # whether the next launch can get other nodes

    @property
    def retryable(self) -> bool:
        """Whether a new start of the gang may succeed."""
        return self.code >= 128

    @property
    def reason(self) -> str:
        """The description of the code."""
        return in_words(self.code)


def log_command(job: Job, ending: GangExit) -> str:
    """The command that shows the log of the rank which explains an ending."""
    rank = (ending.node or 0) * job.processes if ending.rank is None else ending.rank
    which = f"--launch {job.launch}" if not ending.attempt else f"--attempt {ending.attempt}"
    return f"show it: holdfast logs {job.run_id} --rank {rank} {which}"


class Launcher(Protocol):
    """Protocol of launchers, which run one launch at a time."""

    def only_one(self, run_id: str) -> AbstractContextManager[None]:
        """Be the only launcher of a run within the context. Waits for another launcher to leave it."""

    def adopt(self, run_id: str, launch: int) -> bool:
        """Whether launch `launch` of the run continues without a launcher, so that `run` may take it over. Ends all
        other jobs of the run that have lost their launcher. Call it within `only_one`."""

    def run(self, job: Job) -> GangExit:
        """Start the job, or take it over, and follow it to its end."""

    def stop(self) -> None:
        """Tell the running job to save and leave. Returns immediately. Callable from any thread, also when nothing
        runs."""


def pods_of(cluster: Cluster) -> int:
    """The largest number of nodes of a job: those that train, and the spares."""
    return cluster.nodes.max + cluster.spares


def changes_members(cluster: Cluster) -> bool:
    """Whether a gang that lost a node continues within its launch: with fewer nodes, or with a spare."""
    return cluster.nodes.min < cluster.nodes.max or bool(cluster.spares)
