"""Measurements of a rank and its node, and findings of a comparison: records that cross processes as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Severity = Literal["failed", "warned"]
Probe = Literal["arithmetic", "compute", "memory", "link", "disk", "store", "clock", "counters", "versions"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Measured(_Record):
    """Measurements of one rank. Only the first rank of a node has those of the node."""

    rank: int
    node: str  # its scheduler's name
    device: str  # its driver's name; for a CPU, its model
    kind: str  # torch's type of the device
    right: bool = True  # whether products with exact sums were correct
    bits: str = ""  # digest of a fixed product of matrices
    alike: str = ""  # ranks with the same value must have the same bits
    rates: dict[Probe, float] = {}  # compute in FLOP/s; memory, disk and store in bytes per second
    clock_ahead: float | None = None  # seconds ahead of the store's clock
    clock_error: float = 0.0  # largest error of `clock_ahead`, in seconds
    counters: dict[str, int] = {}  # of faults, from the driver
    versions: dict[str, str] = {}  # of drivers and libraries
    notes: tuple[str, ...] = ()  # failed measurements, with the reason


class Link(_Record):
    """Two ranks that sent bytes to each other concurrently."""

    first: int
    second: int
    rate: float  # bytes per second, in one direction


class Finding(_Record):
    """A deviation, with its ranks and nodes."""

    probe: Probe
    severity: Severity
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    words: str
    sure: bool = True  # False: one of the ranks, but it is unknown which


class Report(_Record):
    """One examination of a gang."""

    began: float  # unix seconds, by the clock of rank 0
    seconds: float  # duration
    measured: tuple[Measured, ...]  # in the order of ranks
    links: tuple[Link, ...] = ()
    ring: float | None = None  # bytes per second of the slowest rank, while each sends to the next
    findings: tuple[Finding, ...] = ()
    why: str = ""  # the reason for the examination

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that keep a run from starting."""
        return tuple(finding for finding in self.findings if finding.severity == "failed")

    @property
    def failed_nodes(self) -> tuple[str, ...]:
        """The nodes of ranks that failed."""
        return tuple(sorted({node for finding in self.failures for node in finding.nodes}))
