"""What is measured of a rank and its node, and what a comparison found: records that cross processes as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Severity = Literal["failed", "warned"]
Probe = Literal["arithmetic", "compute", "memory", "link", "disk", "store", "clock", "counters", "versions"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Measured(_Record):
    """What one rank found out about itself. What is of its node stands with the first rank of the node alone."""

    rank: int
    node: str  # as its scheduler calls it
    device: str  # what its driver calls it; of a CPU its model
    kind: str  # torch's type of the device
    right: bool = True  # products whose sums are exact came out as they must
    bits: str = ""  # digest of a fixed product of matrices
    alike: str = ""  # ranks that have the same here must have the same bits
    rates: dict[Probe, float] = {}  # compute in FLOP/s; memory, disk and store in bytes a second
    clock_ahead: float | None = None  # seconds, of the store's clock
    clock_error: float = 0.0  # by which that may be wrong, in seconds
    counters: dict[str, int] = {}  # of faults, as the driver counts them
    versions: dict[str, str] = {}  # of drivers and libraries
    notes: tuple[str, ...] = ()  # what could not be measured, and why


class Link(_Record):
    """Two ranks that sent each other bytes, both at once."""

    first: int
    second: int
    rate: float  # bytes a second, in one direction


class Finding(_Record):
    """Something that is not as it should be, with whom."""

    probe: Probe
    severity: Severity
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    words: str
    sure: bool = True  # whether it is these; False: one of them, and nobody knows which


class Report(_Record):
    """One examination of a gang."""

    began: float  # unix seconds, by the clock of rank 0
    seconds: float  # that it took
    measured: tuple[Measured, ...]  # in the order of ranks
    links: tuple[Link, ...] = ()
    ring: float | None = None  # bytes a second of the slowest rank, while each sends to the next
    findings: tuple[Finding, ...] = ()
    why: str = ""  # it was made

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What keeps a run from starting."""
        return tuple(finding for finding in self.findings if finding.severity == "failed")

    @property
    def failed_nodes(self) -> tuple[str, ...]:
        """The nodes of ranks that failed."""
        return tuple(sorted({node for finding in self.failures for node in finding.nodes}))
