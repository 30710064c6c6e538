"""Folding of events: small objects of a run become one larger object, off the path of the commit.

Each process of each launch leaves its own object. Without folding, a reader of a run of 10,000 launches makes 10,000
requests. At any moment each event is in some object, even if processes die or fold concurrently. The larger object is
written first, its key names its content, and only then are the members deleted. A reader drops duplicates
(`event_log`). Objects that their writer may put again are not folded. The last segment of a writer stays until
QUIET_SECONDS after its last change, by the store's clock. A writer that emits later puts the whole segment again, so
nothing is lost.
"""

import hashlib
import re
from collections.abc import Callable, Hashable, Iterator, Sequence

from holdfast.spec.errors import MissingError
from holdfast.store import ObjectInfo, Store, layout
from holdfast.store.parallel import in_parallel
from holdfast.telemetry.events import Event, PhaseProgress, Progress, TimeSpent

# Condensing of events: of a long run, a reader keeps a bounded number in memory.
#
# Two kinds are emitted continuously: how each rank spent its time, and the progress of the training. When more than
# MOST events are in memory, neighbors of these kinds are merged. Times of a rank are added, and of two progress reports
# the later one stays. All other events stay as they are. A ledger or a cost of condensed events has the same sums. Only
# the position of a second within a merged stretch is lost.

MOST = 20_000  # events in memory: some 50 MB


def condense(events: Sequence[Event]) -> list[Event]:
    """The same events, in their order, with about half as many of the continuous kinds."""
    condensed: dict[int, Event] = {}
    open_at: dict[Hashable, int] = {}  # of each stream: the index of an event that has no partner yet
    newest: dict[Hashable, int] = {index_key: index for index, event in enumerate(events) if (index_key := _key(event))}
    for index, event in enumerate(events):
        condensed[index] = event
        if (key := _key(event)) is None:
            continue
        before = open_at.pop(key, None)
        if before is None:
            open_at[key] = index
        elif (merged := _merged(condensed[before], event)) is not None and newest[key] != before:
            del condensed[before]
            condensed[index] = merged
        else:
            open_at[key] = index
    return list(condensed.values())


def _key(event: Event) -> Hashable | None:
    """The stream that an event belongs to; None for an event that stays."""
    if isinstance(event, TimeSpent):
        return event.kind, event.writer, event.attempt, event.rank
    if isinstance(event, Progress | PhaseProgress):
        return event.kind, event.writer, event.attempt
    return None


def _merged(one: Event, other: Event) -> Event | None:
    """The merge of two neighbors of a stream; None where they cannot be merged."""
    if not isinstance(one, TimeSpent) or not isinstance(other, TimeSpent):
        return other
    metered = (one.joules is None, one.utilisation is None) == (other.joules is None, other.utilisation is None)
    if one.last or one.failed or not metered:
        return None
    seconds = dict(one.seconds)
    for name, duration in other.seconds.items():
        seconds[name] = seconds.get(name, 0.0) + duration
    update: dict[str, object] = {"seconds": seconds, "peak_memory": max(one.peak_memory, other.peak_memory)}
    if one.joules is not None and other.joules is not None:
        update["joules"] = one.joules + other.joules
    if one.utilisation is not None and other.utilisation is not None:
        shares = sum(one.seconds.values()), sum(other.seconds.values())
        total = sum(shares) or 2.0
        weights = shares if sum(shares) else (1.0, 1.0)
        update["utilisation"] = (one.utilisation * weights[0] + other.utilisation * weights[1]) / total
    return other.model_copy(update=update)


FOLD = 64  # objects are folded when there are as many
FULL_FOLD = 4  # or as many, where they are FULL_BYTES together
FULL_BYTES = 2**20  # an object of this size is not folded again
QUIET_SECONDS = 3600.0  # time without a change after which the last segment of a writer is folded

# A segment: <writer>-<number>.jsonl. A fold: <first segment>.<last segment>.<digest>.jsonl. In a listing a fold comes
# before all its members, so the segments of each writer stay in their order.
_SEGMENT = re.compile(r"/([^/.]+)-(\d{6,})\.jsonl$")
_FOLD = re.compile(r"/([^/.]+)\.([^/.]+)\.[0-9a-f]{16}\.jsonl$")


def is_fold(key: str) -> bool:
    """Whether an object holds segments of several writers, which have ended."""
    return _FOLD.search(key) is not None


def fold_events(store: Store, run_id: str, check: Callable[[], None] = lambda: None) -> int:
    """Fold the event objects of a run where FOLD of them are small. `check` is called before each deletion, and raises
    when the caller may not delete any more. Returns the number of deleted objects."""
    infos = list(store.list(layout.run(run_id, "events/")))
    return sum(_fold(store, run_id, chain, check) for chain in _chains(infos) if _is_worth_it(chain))


def _is_worth_it(chain: Sequence[ObjectInfo]) -> bool:
    return len(chain) >= FOLD or (len(chain) >= FULL_FOLD and sum(info.size for info in chain) >= FULL_BYTES)


def _chains(listed: Sequence[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    """Objects that no writer puts again, in the order of their keys, of FULL_BYTES together or a little more."""
    now = max((info.modified for info in listed), default=0.0)
    newest: dict[str, int] = {}  # the last segment of each writer
    for info in listed:
        if match := _SEGMENT.search(info.key):
            newest[match[1]] = int(match[2])
    chain: list[ObjectInfo] = []
    size = 0
    for info in listed:
        segment = _SEGMENT.search(info.key)
        if segment and int(segment[2]) == newest[segment[1]] and now - info.modified < QUIET_SECONDS:
            continue
        if not segment and not is_fold(info.key):
            continue  # other objects are ignored
        if segment or info.size < FULL_BYTES:
            chain.append(info)
            size += info.size
        if size >= FULL_BYTES or (chain and chain[-1] is not info):
            yield chain
            chain, size = [], 0
    yield chain


def _fold(store: Store, run_id: str, chain: Sequence[ObjectInfo], check: Callable[[], None]) -> int:
    try:
        parts = in_parallel(lambda info: store.get(info.key), chain)
    except MissingError:  # another collector folds them at this moment
        return 0
    data = b"".join(stored if stored.endswith(b"\n") or not stored else stored + b"\n" for stored in parts)
    first, last = (_ends_of(info.key) for info in (chain[0], chain[-1]))
    key = layout.run(run_id, f"events/{first[0]}.{last[1]}.{hashlib.sha256(data).hexdigest()[:16]}.jsonl")
    check()
    store.put(key, data)
    sizes = {info.key: info.size for info in store.list(layout.run(run_id, "events/"))}
    read = {info.key: len(part) for info, part in zip(chain, parts, strict=True) if info.key != key}
    folded = [
        member for member, size in read.items() if sizes.get(member) == size
    ]  # not those that have grown meanwhile
    if folded:
        check()
        store.delete_many(folded)
    return len(folded)


def _ends_of(key: str) -> tuple[str, str]:
    """The first and the last segment that an object holds."""
    if fold := _FOLD.search(key):
        return fold[1], fold[2]
    name = key.rpartition("/")[2].removesuffix(".jsonl")
    return name, name
