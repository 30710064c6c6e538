"""A request for one measurement, and its result on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What one measurement process does."""

    measure: str
    accelerator: str
    tiny: bool
    steps: int
    result: str = ""
    seconds: float = 0.0  # its time limit
    variant: str = ""
    store: str = ""
    run_id: str = ""
    launch: int = 1
    kill: bool = False
    fresh: bool = False  # starts a new Python process

    def write(self, results: dict[str, Any]) -> None:
        """Write the results so far."""
        replace_text(Path(self.result), json.dumps(results))


def replace_text(path: Path, text: str) -> None:
    """Write a file that is never seen half-written."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(text)
    partial.replace(path)
