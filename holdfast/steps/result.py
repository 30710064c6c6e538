"""Result of a step for any caller: its values, and artifacts for the UIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Artifact:
    """An artifact for a UI: a document, or a pointer to data in the store under `key`."""

    text: str = ""
    key: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # includes figures; NaN is left out


@dataclass(frozen=True)
class StepResult:
    """The result of a step: `result` as JSON values, and artifacts by their names in the table. `summary` is for the
    exit handler, and defaults to the first output."""

    result: Mapping[str, Any]
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)
    summary: str = ""
