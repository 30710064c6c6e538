"""The history of a run: one row a step, in immutable segments that are written just before each checkpoint commits.

Promises that the history read back has every step up to the last checkpoint exactly once, whatever died in between: a
step that two attempts computed has the same numbers in both (state at a step is a pure function of the inputs), so
overlapping segments agree and the first one wins. Wall-clock fields (`time`, `tokens_per_second`, `system.*`) are what
the attempt that wrote them saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.components.store import Store, layout

# step, time [unix s], loss [nats/token], grad_norm, learning_rate, tokens, tokens_per_second, system.*
Row = dict[str, Any]

PURE_FIELDS = ("step", "loss", "grad_norm", "learning_rate", "tokens")  # the same in every attempt, bit for bit


def write_segment(store: Store, run_id: str, after: int, rows: Sequence[Row]) -> None:
    """Write the rows of the steps in (after, rows[-1]["step"]], oldest first. Writing them again changes nothing."""
    if not rows:
        return
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    store.put_if_absent(layout.metrics(run_id, after, rows[-1]["step"]), text.encode())


def read_history(store: Store, run_id: str, after: int = 0) -> list[Row]:
    """All rows with a step above `after`, in order, each step once."""
    segments = sorted((info.modified, info.key) for info in store.list(layout.run(run_id, "metrics/")))
    rows: dict[int, Row] = {}
    for _, key in segments:  # the one written first wins, so that a row that was read never changes
        if int(key.rsplit("-", 1)[1].split(".")[0]) > after:
            for row in _parse(store.get(key)):
                if row["step"] > after:
                    rows.setdefault(row["step"], row)
    return [rows[step] for step in sorted(rows)]


def _parse(data: bytes) -> Iterable[Row]:
    return (json.loads(line) for line in data.splitlines())
