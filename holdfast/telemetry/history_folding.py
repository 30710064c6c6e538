"""Folding of the history: small segments of an attempt become one larger segment, off the path of the commit.

A run writes a segment for each commit. Without folding, a reader of 10,000 commits makes 10,000 requests. At any moment
the objects in the store have every row that was written, even if processes die or fold concurrently. The larger segment
is written first, its content follows from its key, and only then are those inside it deleted. A reader sees each row
once, because the segments of one attempt may overlap (`history`). Segments of two attempts are never folded into one,
so lineage selects among them as before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from holdfast.spec.errors import MissingError
from holdfast.store import Store, layout
from holdfast.telemetry.history import MetricSegment, segments_of

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
        inside = chain and segment.upto <= end
        if not inside and (segment.after != end or size >= FULL_BYTES):
            yield chain
            chain, size = [], 0
        chain.append(segment)
        end, size = max(end, segment.upto), size + (0 if inside else segment.size)
    yield chain


def _fold(store: Store, run_id: str, chain: Sequence[MetricSegment], check: Callable[[], None]) -> int:
    first, last = chain[0].after, max(segment.upto for segment in chain)
    key = layout.metrics(run_id, first, last, chain[0].attempt)
    parts, end = [], first
    for segment in chain:
        if segment.after == end:  # other segments lie inside those before them
            parts.append(segment)
            end = segment.upto
    gone = [segment.key for segment in chain if segment.key != key]
    if len(parts) > 1:
        try:
            data = [store.get(segment.key) for segment in parts]
        except MissingError:  # another collector folds them at this moment
            return 0
        check()
        store.put(key, b"".join(each if each.endswith(b"\n") or not each else each + b"\n" for each in data))
    if gone:
        check()
        store.delete_many(gone)
    return len(gone)
