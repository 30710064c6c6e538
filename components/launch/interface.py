"""What a launcher promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.components.spec.cluster import Cluster
from holdfast.components.telemetry.events import in_words


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
    environment: Mapping[str, str] = field(default_factory=dict)
    excluded_nodes: frozenset[str] = frozenset()  # names of nodes that failed too often


@dataclass(frozen=True)
class Ending:
    """How a launch ended."""

    code: int
    log_tail: Sequence[str]  # the last lines that the ranks printed
    detail: str = ""  # which rank on which node, why, and where the log is, as far as the launcher knows
    blamed_nodes: frozenset[str] = frozenset()  # nodes that are suspected to be the cause

    @property
    def retryable(self) -> bool:
        """Whether starting the gang again may succeed."""
        return self.code >= 128

    @property
    def reason(self) -> str:
        """The code in words."""
        return in_words(self.code)


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
