"""The history of a run: one row a step, in immutable segments that are written just before each checkpoint commits.

Segments carry the attempt that measured them, and a manifest says which attempt measured which of its steps. So the
history read back is exactly that of the newest checkpoint's weights: every step up to it once, by the attempt whose
arithmetic went into them, whatever others have left. Wall-clock fields (`time`, `step_seconds`,
`tokens_per_second`, `mfu`, `phase_seconds.*`, `system.*`) are what that attempt saw.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from holdfast.components.spec.errors import DataError, MissingError
from holdfast.components.spec.json_parsing import parse_json, parse_json_lines
from holdfast.components.store import Store, layout
from holdfast.components.store.bounded_read import read_bounded
from holdfast.components.store.sequence import records
from holdfast.components.telemetry.lineage import newest_of

log = logging.getLogger("holdfast.telemetry")

# step, time [unix s], loss [nats/token], grad_norm, learning_rate, tokens, tokens_per_second, system.*, state_digest,
# samples [a digest of what the step was fed], step_seconds, mfu [0 to 1], phase_seconds.* [in the mean since the row
# before that has them]
Row = dict[str, Any]
# (after, attempt): which attempt measured the steps above `after`, up to the next entry or the step of the manifest
Lineage = Sequence[tuple[int, int]]
PHASE_SECONDS = "phase_seconds."

PURE_FIELDS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples")  # in every attempt, bit for bit
MAX_ROOT_BYTES = 1 << 28  # as `checkpoint.root` has it
_MANIFEST = re.compile(r"/step-(\d{9,})\.json$")
_SEGMENT = re.compile(r"/(\d{9,})-(\d{9,})\.(\d{6,})\.jsonl$")


class _Root(BaseModel):
    """Of the root of a checkpoint, whose history it is."""

    history: tuple[tuple[int, int], ...]


def segment(run_id: str, after: int, rows: Sequence[Row], attempt: int) -> dict[str, str]:
    """The object (key -> text) with the rows that `attempt` measured of the steps in (after, rows[-1]["step"]], oldest
    first; none without rows. Segments of one attempt may overlap: it measured a step once."""
    if not rows:
        return {}
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return {layout.metrics(run_id, after, rows[-1]["step"], attempt): text}


def read_history(store: Store, run_id: str, after: int = 0) -> list[Row]:
    """The rows of the newest checkpoint with a step above `after`, in order, each step once."""
    step, lineage = _newest_lineage(store, run_id, after)
    if step <= after:
        return []
    spans = [
        (max(begin, after), end, attempt)
        for (begin, attempt), (end, _) in pairwise([*lineage, (step, 0)])
        if end > after
    ]
    rows: dict[int, Row] = {}
    for info in store.list(layout.run(run_id, "metrics/")):
        if not (match := _SEGMENT.search(info.key)):
            continue
        first, last, attempt = (int(part) for part in match.groups())
        for begin, end, writer in spans:
            if writer == attempt and first < end and last > begin:
                rows |= {
                    row["step"]: row for row in _parse(store.get(info.key), info.key) if begin < row["step"] <= end
                }
    return [rows[step] for step in sorted(rows)]


def _newest_lineage(store: Store, run_id: str, after: int) -> tuple[int, Lineage]:
    """The step of the newest checkpoint whose manifest can be read, and who measured its steps; 0 if there is none.
    One that is not above `after` is not read."""
    keys = [info.key for info in store.list(layout.run(run_id, "checkpoints/step-"))]
    by_step = {int(match[1]): key for key in keys if (match := _MANIFEST.search(key))}
    lineages: dict[int, Lineage] = {}

    def writer_of(step: int) -> int | None:
        if step not in lineages:
            lineages[step] = _lineage_of(store, by_step[step])
        return lineages[step][-1][1] if lineages[step] else None

    steps = sorted(by_step)
    while steps and steps[-1] > after and writer_of(steps[-1]) is None:
        steps.pop()
    if not steps or steps[-1] <= after:
        return (steps[-1] if steps else 0), ()
    newest = newest_of(steps, writer_of, lambda: (number for number, _ in records(store, layout.attempts(run_id))))
    return newest, lineages[newest]


def _lineage_of(store: Store, key: str) -> Lineage:
    """What a root says of its history; nothing where it cannot be read."""
    try:
        return parse_json(read_bounded(store, key, MAX_ROOT_BYTES), _Root, key).history
    except (MissingError, DataError) as error:
        log.debug("%s: %s; the history is that of the checkpoint before", key, error)
        return ()


def _parse(data: bytes, key: str) -> Iterable[Row]:
    for row in parse_json_lines(data, key, "delete it: the history then lacks the steps that it has"):
        if type(row.get("step")) is not int:
            raise DataError(f"{key}: is damaged (a row has no step); delete it: the history then lacks its steps")
        yield row
