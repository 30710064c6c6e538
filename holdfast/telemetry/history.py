"""The history of a run: one row per step, in immutable segments. A segment is written just before its checkpoint
commits, and folded into a larger one later (`fold_history`).

Segments carry the attempt that measured them, and a manifest maps its steps to the attempts that measured them. So the
history is exactly that of the newest checkpoint's weights. It has every step up to it once, by the attempt whose
arithmetic went into them, regardless of other segments. Wall-clock fields (`time`, `step_seconds`, `tokens_per_second`,
`mfu`, `phase_seconds.*`, `system.*`) are those of that attempt.
"""

import json
import logging
import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from holdfast.spec.errors import DataError, MissingError
from holdfast.spec.json_parsing import parse_json, parse_json_lines
from holdfast.store import Store, layout
from holdfast.store.commit_order import newest_of
from holdfast.store.json_reading import read_bounded
from holdfast.store.parallel import in_parallel
from holdfast.store.sequence import records

log = logging.getLogger("holdfast.telemetry")

# step, time [Unix s], loss [nats/token], grad_norm, learning_rate, tokens, tokens_per_second, system.*, state_digest,
# samples [a digest of the step's tokens], objective.* [the terms of an objective with several], step_seconds, mfu [0 to
# 1], phase_seconds.* [mean since the previous row that has them]
Row = dict[str, Any]
# (after, attempt): the attempt that measured the steps above `after`, up to the next entry or the step of the manifest
Lineage = Sequence[tuple[int, int]]
PHASE_SECONDS = "phase_seconds."
OBJECTIVE = "objective."
EVALUATION = "evaluation."  # scores of an earlier step, `evaluation.step`

PURE_FIELDS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "samples")  # equal in every attempt, bit for bit
MEASURED_FIELDS = ("time", "step_seconds", "tokens_per_second", "mfu")
READ_BYTES = 16 * 2**20  # limit of segments that are read together
TRIES = 5  # limit for a reader whose segments are folded while it reads
MAX_ROOT_BYTES = 1 << 28  # equal to that of `checkpoint.root`
_MANIFEST = re.compile(r"/step-(\d{9,})\.json$")
_SEGMENT = re.compile(r"/(\d{9,})-(\d{9,})\.(\d{6,})\.jsonl$")


class _Root(BaseModel):
    """The history field of the root of a checkpoint."""

    history: tuple[tuple[int, int], ...]


def is_pure(name: str) -> bool:
    """Whether a field of a row of a script is equal in every attempt, bit for bit: whether it is not measured."""
    return name not in MEASURED_FIELDS and not name.startswith(("system.", PHASE_SECONDS))


def segment(run_id: str, after: int, rows: Sequence[Row], attempt: int) -> dict[str, str]:
    """The object (key -> text) with the rows that `attempt` measured of the steps in (after, rows[-1]["step"]], oldest
    first; empty without rows. Segments of one attempt may overlap: it measured a step once."""
    if not rows:
        return {}
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    return {layout.metrics(run_id, after, rows[-1]["step"], attempt): text}


def read_history(store: Store, run_id: str, after: int = 0) -> list[Row]:
    """The rows of the newest checkpoint with a step above `after`, in order, each step once."""
    return list(iter_history(store, run_id, after))


def iter_history(store: Store, run_id: str, after: int = 0) -> Iterator[Row]:
    """The same, one after another. READ_BYTES of segments are read together, several objects concurrently. Raises
    DataError for a damaged segment."""
    step, lineage = _newest_lineage(store, run_id, after)
    yield from _rows_of(store, run_id, spans_of(lineage, step), after)


class HistoryFollower:
    """Follows the history of a run. Each reading returns the rows of `read_history`, and reads from the store only rows
    that are new, or that another attempt has measured since."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._spans: list[tuple[int, int, int]] = []
        self._rows: list[Row] = []

    def read(self) -> list[Row]:
        """All rows of the newest checkpoint, in order. The caller owns the list. Raises DataError for a damaged
        segment."""
        step, lineage = _newest_lineage(self._store, self._run_id, 0)
        spans = spans_of(lineage, step)
        common = _agreement(self._spans, spans)
        rows = self._rows[: bisect_right(self._rows, common, key=lambda row: int(row["step"]))]
        rows += _rows_of(self._store, self._run_id, spans, common)
        self._spans, self._rows = spans, rows
        return list(rows)


def _agreement(one: Sequence[tuple[int, int, int]], other: Sequence[tuple[int, int, int]]) -> int:
    """The step up to which two histories have the same attempts."""
    agreed = 0
    for (begin, end, attempt), (their_begin, their_end, their_attempt) in zip(one, other, strict=False):
        if (begin, attempt) != (their_begin, their_attempt):
            break
        agreed = min(end, their_end)
        if end != their_end:
            break
    return agreed


def spans_of(lineage: Lineage, step: int) -> list[tuple[int, int, int]]:
    """The attempts that measured the steps up to `step`: (after, up to, attempt)."""
    return [(begin, end, attempt) for (begin, attempt), (end, _) in pairwise([*lineage, (step, 0)]) if end > begin]


def _rows_of(store: Store, run_id: str, spans: Sequence[tuple[int, int, int]], after: int) -> Iterator[Row]:
    """The rows of the spans' attempts for steps above `after`. One listing finds the segments of all."""
    done = after
    spans = [span for span in spans if span[1] > after]
    for try_number in range(TRIES if spans else 0):
        by_attempt = defaultdict[int, list[MetricSegment]](list)
        for segment in segments_of(store, run_id):
            by_attempt[segment.attempt].append(segment)
        reads = deque(
            (segment_read, begin, end)
            for begin, end, attempt in spans
            if end > done
            for segment_read in cover(by_attempt[attempt], max(begin, done), end)
        )
        try:
            while reads:
                batch = [reads.popleft()]
                size = batch[0][0].size
                while reads and size + reads[0][0].size <= READ_BYTES:
                    size += reads[0][0].size
                    batch.append(reads.popleft())
                read = in_parallel(lambda one: store.get(one[0].key), batch)
                for (segment_read, begin, end), data in zip(batch, read, strict=True):
                    for row in _parse(data, segment_read.key):
                        if max(begin, done) < row["step"] <= end:
                            done = row["step"]
                            yield row
            return
        except MissingError:  # it was folded into a larger one since it was listed
            if try_number == TRIES - 1:
                raise


@dataclass(frozen=True)
class MetricSegment:
    """An object with rows, described by its key."""

    key: str
    after: int
    upto: int
    attempt: int
    size: int  # bytes


def segments_of(store: Store, run_id: str, attempt: int | None = None) -> list[MetricSegment]:
    """The segments of a run, or of one attempt, in the order of their first steps."""
    segments = []
    for info in store.list(layout.run(run_id, "metrics/")):
        if (match := _SEGMENT.search(info.key)) and attempt in (None, int(match[3])):
            segments.append(MetricSegment(info.key, int(match[1]), int(match[2]), int(match[3]), info.size))
    return sorted(segments, key=lambda one: (one.after, one.upto))


def cover(segments: Sequence[MetricSegment], after: int, upto: int) -> list[MetricSegment]:
    """The fewest segments of one attempt (sorted) that contain its steps in (after, upto]. Among those that begin no
    later than the previous ones end, it takes the one that ends last. A segment has all that the attempt measured of
    its steps."""
    chosen: list[MetricSegment] = []
    done, index = after, 0
    while done < upto:
        best = None
        while index < len(segments) and segments[index].after <= done:
            if segments[index].upto > done and (best is None or segments[index].upto > best.upto):
                best = segments[index]
            index += 1
        if best is None:
            if index == len(segments) or segments[index].after >= upto:
                break
            done = segments[index].after  # nothing was measured in between
            continue
        chosen.append(best)
        done = best.upto
    return chosen


def _newest_lineage(store: Store, run_id: str, after: int) -> tuple[int, Lineage]:
    """The step and the lineage of the newest checkpoint with a readable manifest; 0 without one. A manifest at or below
    `after` is not read."""
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
    newest = newest_of(steps, writer_of, lambda than: _claims(store, run_id, than))
    return newest, lineages[newest]


def _claims(store: Store, run_id: str, than: int) -> Iterator[int]:
    return (number for number, _ in records(store, layout.attempts(run_id), after=than))


def _lineage_of(store: Store, key: str) -> Lineage:
    """The history in a root; empty if the root cannot be read."""
    try:
        return parse_json(read_bounded(store, key, MAX_ROOT_BYTES), _Root, key).history
    except (MissingError, DataError) as error:
        log.debug("%s: %s; the history is that of the checkpoint before", key, error)
        return ()


def _parse(data: bytes, key: str) -> Iterable[Row]:
    remedy = "delete it: the history then lacks the steps that it has"
    for row in parse_json_lines(data, key, remedy, finite=False):
        if type(row.get("step")) is not int:
            raise DataError(f"{key}: is damaged (a row has no step); delete it: the history then lacks its steps")
        yield row


# Folding of the history: small segments of an attempt become one larger segment, off the path of the commit.
#
# A run writes a segment for each commit. Without folding, a reader of 10,000 commits makes 10,000 requests. At any
# moment the objects in the store have every row that was written, even if processes die or fold concurrently. The
# larger segment is written first, its content follows from its key, and only then are those inside it deleted. A reader
# sees each row once, because the segments of one attempt may overlap (`history`). Segments of two attempts are never
# folded into one, so lineage selects among them as before.

FOLD = 64  # segments of an attempt that still writes, from which they are folded
FULL_BYTES = 4 * 2**20  # a segment of this size is not folded again


def fold_history(store: Store, run_id: str, attempt: int, check: Callable[[], None] = lambda: None) -> int:
    """Fold the segments of `attempt` once there are FOLD of them, and those of older attempts. `check` is called before
    each deletion, and raises when the caller may not delete any more. Returns the number of deleted objects."""
    deleted = 0
    by_attempt = defaultdict[int, list[MetricSegment]](list)
    for segment in segments_of(store, run_id):
        by_attempt[segment.attempt].append(segment)
    for number, segments in sorted(by_attempt.items()):
        if number > attempt:
            continue
        for chain in _chains(segments):
            if len(chain) >= (FOLD if number == attempt else 2):
                deleted += _fold(store, run_id, chain, check)
    return deleted


def _chains(segments: Sequence[MetricSegment]) -> Iterator[list[MetricSegment]]:
    """Consecutive segments of one attempt, of FULL_BYTES together or a little more. A segment inside another one is
    left over from a fold that died, and belongs to its chain."""
    chain: list[MetricSegment] = []
    end, size = -1, 0
    for segment in sorted(segments, key=lambda one: (one.after, -one.upto)):
        is_inside = chain and segment.upto <= end
        if not is_inside and (segment.after != end or size >= FULL_BYTES):
            yield chain
            chain, size = [], 0
        chain.append(segment)
        end, size = max(end, segment.upto), size + (0 if is_inside else segment.size)
    yield chain


def _fold(store: Store, run_id: str, chain: Sequence[MetricSegment], check: Callable[[], None]) -> int:
    first, last = chain[0].after, max(segment.upto for segment in chain)
    key = layout.metrics(run_id, first, last, chain[0].attempt)
    parts, end = [], first
    for segment in chain:
        if segment.after == end:  # other segments lie inside those before them
            parts.append(segment)
            end = segment.upto
    folded = [segment.key for segment in chain if segment.key != key]
    if len(parts) > 1:
        try:
            data = [store.get(segment.key) for segment in parts]
        except MissingError:  # another collector folds them at this moment
            return 0
        check()
        store.put(key, b"".join(part if part.endswith(b"\n") or not part else part + b"\n" for part in data))
    if folded:
        check()
        store.delete_many(folded)
    return len(folded)
