"""Report of a health check for a terminal: the ranks in a table, skipped checks, and findings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.health import Measured, Report

SHOWN = 64  # ranks


def print_report(report: Report) -> str:
    """The report as text."""
    from holdfast.health.verdict import shown_rate

    rows = [["rank", "node", "device", "compute", "memory", "disk", "store", "clock"]]
    for measured in report.measured[:SHOWN]:
        rates = [
            shown_rate(measured.rates[probe], probe) if probe in measured.rates else "-"
            for probe in ("compute", "memory", "disk", "store")
        ]
        rows.append([str(measured.rank), measured.node, measured.device, *rates, _clock(measured)])
    lines = _table(rows)
    if len(report.measured) > SHOWN:
        lines.append(f"and {len(report.measured) - SHOWN} more ranks: see --json")
    if report.links:
        pairs = [link.rate for link in report.links]
        lines.append(
            f"links: {len(pairs)} pairs, {shown_rate(min(pairs), 'link')} at least and "
            f"{shown_rate(median(pairs), 'link')} in the median; all in a ring {shown_rate(report.ring or 0, 'link')}"
        )
    versions = next((measured.versions for measured in report.measured if measured.versions), {})
    lines.append(", ".join(f"{name} {value}" for name, value in versions.items() if name != "device"))
    notes = dict.fromkeys(note for measured in report.measured for note in measured.notes)
    lines += [f"not looked at: {note}" for note in notes]
    lines += [f"{finding.severity}: {finding.words}" for finding in report.findings]
    count = f"{len(report.measured)} rank{'s' if len(report.measured) != 1 else ''}"
    failed = f"FAILED on {', '.join(report.failed_nodes)}" if report.failures else "no rank failed"
    lines.append(f"{failed}; {count} in {report.seconds:.1f} s")
    return "\n".join(lines)


def _clock(one: Measured) -> str:
    if one.clock_ahead is None:
        return "-"
    excess = abs(one.clock_ahead) - one.clock_error
    return "with the store's" if excess < 0 else f"{one.clock_ahead:+.1f} s"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
