"""Verdict on ranks, links and nodes that differ from their peers: arithmetic on the measurements.

A rate is too low if it is below a share of its peers' rate *and* further from it than their own spread explains. The
spread is 3.5 scaled median absolute deviations (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993). For an
even number of peers, the better middle one counts, so of two ranks the slower one is reported. The findings do not
depend on the order of the measurements.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import Literal

from pydantic import BaseModel

from holdfast.planning.hardware import by_device

# Measurements of a rank and its node, and findings of a comparison: records that cross processes as JSON.

Severity = Literal["failed", "warned"]
Probe = Literal["arithmetic", "compute", "memory", "link", "disk", "store", "clock", "counters", "versions"]


class _Record(BaseModel, frozen=True, extra="ignore"):
    """A part of a verdict."""


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


SPREAD = 3.5  # scaled median absolute deviations that still count as normal
_SCALE = 1.4826  # from the median absolute deviation to the standard deviation of a normal distribution
CLOCK_WARNS, CLOCK_FAILS = 1.0, 60.0  # seconds from the store's clock, and from that of most nodes


@dataclass(frozen=True)
class Limit:
    """Shares of the peers' rate below which a rank gets a warning, or fails."""

    warns: float
    fails: float

    def severity(self, share: float) -> Severity | None:
        """The severity of a share of the usual rate; None if it is normal."""
        return "failed" if share < self.fails else "warned" if share < self.warns else None


# Accelerators of one kind differ by a few percent. Shared resources (cores, disks, networks) fail a node only at a
# different order of magnitude.
_ACCELERATOR, _CPU = Limit(0.9, 0.75), Limit(0.5, 0.1)
_LINK, _LINK_OF_CPU = Limit(0.6, 0.3), Limit(0.3, 0.05)
_DISK = _STORE = Limit(0.3, 0.001)
_OF_USUAL_PEAK = Limit(0.8, 0.5)  # share of the rate of large products on such a device
UNITS = {"compute": "FLOP/s", "memory": "B/s", "disk": "B/s", "store": "B/s", "link": "B/s"}

# FATAL: counters of faults after which a device computes, or will compute, wrong. SUSPICIOUS: after which it should be
# reset. Contained uncorrected errors ended one process, but they count until the driver is loaded again.
FATAL = {
    "failed row remaps": "memory rows that could not be replaced",
    "xid 48": "a memory error that was not corrected (Xid 48)",
    "xid 64": "a memory page that could not be retired (Xid 64)",
    "xid 74": "an NVLink error (Xid 74)",
    "xid 79": "the device has fallen off the bus (Xid 79)",
    "xid 95": "an uncontained memory error (Xid 95)",
}
SUSPICIOUS = {
    "uncorrected ECC errors": "memory errors that were not corrected: reset the device",
    "pending row remaps": "memory rows wait to be replaced: reset the device",
    "pending retired pages": "memory pages wait to be retired: reset the device",
    "xid 63": "a memory page was retired (Xid 63)",
    "xid 94": "a contained memory error (Xid 94)",
}


def judge(measured: Sequence[Measured], links: Sequence[Link] = ()) -> tuple[Finding, ...]:
    """The findings, the worst first. `measured` has every rank once."""
    ranks = {rank.rank: rank for rank in sorted(measured, key=lambda one: one.rank)}
    findings = [
        *_arithmetic(ranks),
        *_rates(ranks),
        *_peaks(ranks),
        *_links(ranks, links),
        *_clocks(ranks),
        *_counters(ranks),
        *_versions(ranks),
    ]
    return tuple(sorted(findings, key=lambda finding: (finding.severity != "failed", finding.ranks, finding.probe)))


Ranks = Mapping[int, Measured]


def _arithmetic(ranks: Ranks) -> Iterator[Finding]:
    for measured in ranks.values():
        if not measured.right:
            yield _finding(
                ranks,
                [measured.rank],
                "arithmetic",
                "failed",
                "a product of matrices whose sums are exact came out wrong",
            )
    groups = _groups((measured for measured in ranks.values() if measured.bits), lambda one: one.alike)
    for peers in groups:
        counts = Counter(measured.bits for measured in peers)
        if len(counts) == 1:
            continue
        (most, count), *_ = counts.most_common()
        majority = 2 * count > len(peers)
        odd = [measured.rank for measured in peers if not majority or measured.bits != most]
        if any(not ranks[rank].right for rank in odd):  # that rank is known; nothing is known of the rest
            odd = [rank for rank in odd if majority and ranks[rank].right]
        difference = f"from the majority of {len(peers)}" if majority else "and none is in the majority"
        for rank in odd:
            text = f"the bits of a fixed product differ {difference}"
            yield _finding(ranks, [rank], "arithmetic", "failed", text, sure=majority)


def _rates(ranks: Ranks) -> Iterator[Finding]:
    for probe in ("compute", "memory", "disk", "store"):
        having = [one for one in ranks.values() if probe in one.rates]
        if probe == "disk":
            for one in having:
                if not one.rates[probe]:
                    yield _finding(ranks, [one.rank], probe, "failed", "nothing can be written")
            having = [one for one in having if one.rates[probe]]
        for peers in _groups(having, _device) if probe in ("compute", "memory") else [having] if having else []:
            limit = {"disk": _DISK, "store": _STORE}.get(probe, _CPU if peers[0].kind == "cpu" else _ACCELERATOR)
            values = {one.rank: one.rates[probe] for one in peers}
            for rank, severity, usual in outliers(values, limit):
                text = f"{shown_rate(values[rank], probe)}, and its {len(peers) - 1} peers {shown_rate(usual, probe)}"
                yield _finding(ranks, [rank], probe, severity, text)


def outliers(values: Mapping[int, float], limit: Limit) -> Iterator[tuple[int, Severity, float]]:
    """(rank, severity, usual value) of ranks whose values are too low compared with their peers."""
    if len(values) < 2:
        return
    usual = median_high(values.values())
    spread = _SCALE * median(abs(value - usual) for value in values.values()) if len(values) > 2 else 0.0
    for rank, value in sorted(values.items()):
        if usual - value > SPREAD * spread and (severity := limit.severity(value / usual)):
            yield rank, severity, usual


def _peaks(ranks: Ranks) -> Iterator[Finding]:
    for rank in ranks.values():
        board, rate = by_device(rank.device), rank.rates.get("compute")
        if board is None or rate is None:
            continue
        usual = board.reach * board.bf16
        if severity := _OF_USUAL_PEAK.severity(rate / usual):
            usual_text = shown_rate(usual, "compute")
            text = f"{shown_rate(rate, 'compute')}, where large products reach {usual_text} on such a board"
            yield _finding(ranks, [rank.rank], "compute", severity, text)


def _links(ranks: Ranks, links: Sequence[Link]) -> Iterator[Finding]:
    """Findings about links. A rank is judged by its best link, because a slow peer slows its partners. Then each link
    is compared with its ends."""
    for within in (True, False):
        links_of_scope = [link for link in links if (ranks[link.first].node == ranks[link.second].node) is within]
        best: dict[int, float] = defaultdict(float)
        for link in links_of_scope:
            for rank in (link.first, link.second):
                best[rank] = max(best[rank], link.rate)
        slow: set[int] = set()
        scope = "in its node" if within else "to other nodes"
        for peers in _groups((ranks[rank] for rank in sorted(best)), _device):
            for rank, severity, usual in outliers(
                {peer.rank: best[peer.rank] for peer in peers}, _limit_of_links(peers)
            ):
                slow.add(rank)
                rate_text, usual_text = shown_rate(best[rank], "link"), shown_rate(usual, "link")
                text = f"its best link {scope} carries {rate_text}, and those of others {usual_text}"
                yield _finding(ranks, [rank], "link", severity, text)
        for link in links_of_scope:
            usual = min(best[link.first], best[link.second])
            limit = _limit_of_links([ranks[link.first], ranks[link.second]])
            if usual and link.rate < limit.fails * usual and not slow & {link.first, link.second}:
                rate_text, usual_text = shown_rate(link.rate, "link"), shown_rate(usual, "link")
                text = f"the link between them carries {rate_text}, and others of theirs {usual_text}"
                yield _finding(ranks, [link.first, link.second], "link", "warned", text)


def _limit_of_links(ends: Iterable[Measured]) -> Limit:
    return _LINK_OF_CPU if any(end.kind == "cpu" for end in ends) else _LINK


def _clocks(ranks: Ranks) -> Iterator[Finding]:
    offsets = {
        rank_measured.rank: rank_measured.clock_ahead
        for rank_measured in ranks.values()
        if rank_measured.clock_ahead is not None
    }
    usual = median(offsets.values()) if offsets else 0.0
    for rank, ahead in offsets.items():
        error = ranks[rank].clock_error
        least = abs(ahead) - error
        if least >= CLOCK_WARNS:
            direction = "ahead of" if ahead > 0 else "behind"
            text = f"its clock is at least {least:.1f} s {direction} the store's: set one of them by NTP"
            # Otherwise the store's clock may be wrong.
            alone = len(offsets) > 2 and abs(ahead - usual) - error >= CLOCK_FAILS
            yield _finding(ranks, [rank], "clock", "failed" if alone else "warned", text)


def _counters(ranks: Ranks) -> Iterator[Finding]:
    for rank in ranks.values():
        levels: tuple[tuple[Severity, Mapping[str, str]], ...] = (("failed", FATAL), ("warned", SUSPICIOUS))
        for severity, names in levels:
            for name, words in names.items():
                if count := rank.counters.get(name, 0):
                    yield _finding(ranks, [rank.rank], "counters", severity, f"{words}: {count}")


def _versions(ranks: Ranks) -> Iterator[Finding]:
    having = [measured for measured in ranks.values() if measured.versions]
    for name in sorted({name for measured in having for name in measured.versions}):
        values = {measured.rank: measured.versions.get(name, "missing") for measured in having}
        counts = Counter(values.values()).most_common()
        if len(counts) == 1:
            continue
        usual = counts[0][0]
        odd = [rank for rank, value in values.items() if value != usual]
        odd_values = ", ".join(sorted({values[rank] for rank in odd})[:4])
        yield _finding(ranks, odd, "versions", "warned", f"{name} is {odd_values}, and {usual} elsewhere")


def _finding(
    ranks: Ranks, odd: Sequence[int], probe: Probe, severity: Severity, words: str, sure: bool = True
) -> Finding:
    nodes = tuple(dict.fromkeys(ranks[rank].node for rank in odd))
    names = " and ".join(f"rank {rank} on {ranks[rank].node}" for rank in odd[:4])
    more = f" and {len(odd) - 4} more" if len(odd) > 4 else ""
    return Finding(
        probe=probe,
        severity=severity,
        ranks=tuple(odd),
        nodes=nodes,
        words=f"{names}{more}: {probe}: {words}",
        sure=sure,
    )


def _device(one: Measured) -> str:
    return one.device


def _groups(ranks: Iterable[Measured], key: Callable[[Measured], str]) -> list[list[Measured]]:
    groups: dict[str, list[Measured]] = defaultdict(list)
    for rank in ranks:
        groups[key(rank)].append(rank)
    return list(groups.values())


def shown_rate(value: float, probe: str) -> str:
    """A rate in readable form: 412 TFLOP/s, 3.2 GB/s."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{UNITS[probe]}"
    return f"{value:.3g} {UNITS[probe]}"
