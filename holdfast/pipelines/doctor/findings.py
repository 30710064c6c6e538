"""Findings, and their output for a person, a script and the shell."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from holdfast.spec.errors import ExitCode

Outcome = Literal["ok", "warn", "fail"]
TIMEOUT = 10  # seconds per response


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    check: str
    outcome: Outcome
    message: str
    remedy: str = ""
    code: ExitCode = field(default=ExitCode.NOT_FOUND)  # of the command, if this is the first failure


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    """The exit code of the first failure."""
    return next((finding.code for finding in findings if finding.outcome == "fail"), ExitCode.OK)


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """The findings for a script."""
    return [{**asdict(finding), "code": int(finding.code)} for finding in findings]


def print_findings(findings: list[Finding]) -> str:
    """The findings as lines for a person."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.outcome.upper():<4}  {finding.check}: {finding.message}")
        if finding.outcome != "ok" and finding.remedy:
            lines.append(f"      fix: {finding.remedy}")
    counts = {outcome: sum(item.outcome == outcome for item in findings) for outcome in ("ok", "warn", "fail")}
    lines.append(f"{counts['ok']} fine, {counts['warn']} to look at, {counts['fail']} to fix")
    return os.linesep.join(lines)
