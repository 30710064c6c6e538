"""Result of a step, whoever called it: its values, and artifacts for the UIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Artifact:
    """What a UI shows of a step: a document, or a pointer to what lies in the store under `key`."""

    text: str = ""
    key: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # with figures; NaN is left out


@dataclass(frozen=True)
class StepResult:
    """What came of a step: `result` as JSON can hold it, artifacts by their names in the table, and, if it is not the
    first output, what the exit handler is told."""

    result: Mapping[str, Any]
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    summary: str = ""
