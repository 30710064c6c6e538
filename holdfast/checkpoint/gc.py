"""Garbage collection: removes checkpoints that retention does not keep, then indexes and packs that no checkpoint
needs.

It runs off the path of the commit, by one collector at a time (a lease), in batches. Roots are deleted first, indexes
next, packs last, so a crash in between leaves garbage and never a broken checkpoint. `docs/checkpoints.md` explains why
nothing needed is ever removed. Needed are kept checkpoints, the roots in pins and in marks of readers, and quarantined
checkpoints. So is everything newer than the newest commit of this attempt, which may be part of a save in flight.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.commit import Clock
from holdfast.checkpoint.lineage import void_steps
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import fetch_child
from holdfast.checkpoint.retention import PinRecord, Retention, checkpoint_times, pinned_steps
from holdfast.checkpoint.root import UnfitError
from holdfast.checkpoint.tree import Entry, Node
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.spec.json_parsing import parse_json
from holdfast.store import ConflictError, Store, layout
from holdfast.store.interface import ObjectInfo
from holdfast.telemetry.event_folding import fold_events
from holdfast.telemetry.history import fold_history

# A lease: at most one holder works at a time, and another one follows a holder that dies.
#
# Clocks of two machines are never compared. The holder changes the record periodically. Another contender takes it over
# after seeing it unchanged for LEASE_SECONDS by its own monotonic clock. It takes it over immediately when it is of a
# newer attempt, whose claim has fenced the holder off. A holder that was frozen finds that its version of the record is
# gone, and stops.

LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class _Record:
    """The lease as it is stored."""

    owner: str
    attempt: int
    held: bool


class LostLeaseError(HoldfastError):
    """Another holder has taken over."""


class Lease:
    """One contender for the lease at `key`."""

    def __init__(self, store: Store, key: str, attempt: int, clock: Clock) -> None:
        self._store, self._key, self._attempt, self._clock = store, key, attempt, clock
        self._owner, self._beat = uuid.uuid4().hex, 0
        self._version: str | None = None  # version of the record, while this contender holds it
        self._seen: tuple[str, float] | None = None  # the version of another's record, and since when

    def take(self) -> bool:
        """Try to become the holder."""
        try:
            data, version = self._store.get_versioned(self._key)
        except MissingError:
            data, version = b"{}", None
        if version is not None and not self._free(data) and not self._silent(version):
            return False
        try:
            self._version = self._swap(version, held=True)
        except ConflictError:
            return False
        self._seen = None
        return True

    def renew(self) -> None:
        """Record that the holder is at work. Raises LostLeaseError when it is not the holder any more."""
        try:
            self._version = self._swap(self._version, held=True)
        except ConflictError:
            raise LostLeaseError(f"{self._key}: another collector has taken over") from None

    def release(self) -> None:
        """Let another contender begin immediately. Raises LostLeaseError as `renew`."""
        try:
            self._swap(self._version, held=False)
        except ConflictError:
            raise LostLeaseError(f"{self._key}: another collector has taken over") from None

    def _free(self, data: bytes) -> bool:
        """Whether a record blocks no contender: released, of an older attempt, this one's own, or torn."""
        try:
            record = parse_json(data, _Record, self._key)
        except DataError:
            return True
        return not record.held or record.attempt < self._attempt or record.owner == self._owner

    def _silent(self, version: str) -> bool:
        now = self._clock.monotonic()
        if self._seen is None or self._seen[0] != version:
            self._seen = version, now
        return now - self._seen[1] >= LEASE_SECONDS

    def _swap(self, expected: str | None, *, held: bool) -> str:
        self._beat += 1
        record = {"owner": self._owner, "attempt": self._attempt, "beat": self._beat, "held": held}
        return self._store.compare_and_swap(self._key, json.dumps(record).encode(), expected)


T = TypeVar("T")
_Sign = tuple[str, float]  # version, and when it was written by the store's clock
log = logging.getLogger("holdfast.checkpoint")

BATCH = 1000  # objects of one request, between two checks of the fence and the lease
MARK_SECONDS = 3600.0  # lifetime of a reader's mark after its last sign of life
FOLD_EVERY = 32  # collections
ABANDONED_SECONDS = 3600.0  # interval between two searches for abandoned uploads

_INDEX = re.compile(r"/indexes/(\d{6,})-(\d{9,})/[^/]+\.(idx|failed)$")
_PACK = re.compile(r"/packs/(\d{6,})-(\d{9,})-[0-9a-f]{32}\.pack$")


@dataclass(frozen=True)
class _Needs:
    """The keys of the indexes and packs of a child of the tree, without the levels below it, and the entries of those
    levels."""

    keys: frozenset[str]
    below: tuple[Entry, ...]


@dataclass
class Collector:
    """Collects for one attempt, commit after commit. Caches what it has read, if it never changes."""

    store: Store
    attempt: Attempt
    retention: Retention
    clock: Clock = time
    folds: bool = True  # the history and the events, too
    _roots: dict[str, Manifest] = field(default_factory=dict)  # by key and version
    _pinned: dict[str, tuple[Manifest, ...]] = field(default_factory=dict)  # the roots in a pin, by key and version
    _needs: dict[str, _Needs] = field(default_factory=dict)  # by the digest of a child
    _marks: dict[str, tuple[_Sign, float]] = field(default_factory=dict)  # key -> its last sign of life, since when
    _collections: int = 0  # number of collections by this collector
    _ended: float | None = None  # when uploads were ended last

    def __post_init__(self) -> None:
        self._lease = Lease(self.store, layout.collector(self.attempt.run_id), self.attempt.number, self.clock)

    def collect(self, committed: int) -> int:
        """Delete what nothing needs, given the checkpoint that was just `committed`. That one always stays: later ones
        may be those of a replaced attempt, and the next save references it. Returns the number of objects; 0 also when
        another collector is at work. Raises FencedError when the attempt has been replaced, and what the store raises.
        """
        self.attempt.check(self.store)
        if not self._lease.take():
            log.debug("another collector is at work")
            return 0
        try:
            deleted = self._collect(committed)
            self._lease.release()
        except LostLeaseError:
            log.info("another collector has taken over; this one stops")
            return 0
        except HoldfastError:
            with suppress(HoldfastError):
                self._lease.release()
            raise
        return deleted

    def _collect(self, committed: int) -> int:
        run_id = self.attempt.run_id
        times = checkpoint_times(self.store, run_id)
        void = self._void(committed)
        counted = {step: moment for step, moment in times.items() if step not in void}
        kept = {*self.retention.kept(counted, pinned_steps(self.store, run_id)), committed}
        damaged = steps_in(self.store, layout.damaged(run_id))
        released = {step for step in damaged if sum(other > step for other in kept) >= self.retention.keep_last}
        # Void roots above `committed` stay until the step is written anew, which a newer attempt may do now.
        going = [step for step in times if step not in kept and (step < committed or step not in void)]
        deleted = self._delete_roots(going)
        deleted += self._delete([layout.damaged(run_id, step) for step in sorted(released)])
        deleted += self._delete_answers(min(kept))
        doubted = tuple(layout.doubts(run_id, step) for step in kept)
        deleted += self._delete([key for key in self._keys(layout.doubts(run_id)) if not key.startswith(doubted)])
        needed_keys = self._needed(committed)  # of what exists now: a later mark finds its checkpoint gone
        if needed_keys is not None:
            newest = (self.attempt.number, committed)
            for pattern, folder in ((_INDEX, layout.indexes(run_id)), (_PACK, layout.packs(run_id))):
                deleted += self._delete(
                    [key for key in self._keys(folder) if key not in needed_keys and _is_old(pattern, key, newest)]
                )
        self._end_abandoned()
        self._fold_telemetry()
        return deleted

    def _delete_answers(self, oldest: int) -> int:
        """Delete the records of answers that the oldest checkpoint does not need, by the steps that learned first."""
        if (before := self.retention.answer_steps) is None:
            return 0
        run_id, first = self.attempt.run_id, oldest + 1 - before
        names = self.store.folders(layout.rollouts(run_id))
        steps = sorted(int(name) for name in names if name.isdecimal() and int(name) < first)
        return sum(self._delete(self._keys(layout.rollout(run_id, step))) for step in steps)

    def _delete_roots(self, steps: Sequence[int]) -> int:
        """Delete checkpoints. Restore one that was pinned while it was deleted."""
        run_id, deleted = self.attempt.run_id, 0
        for batch in _batches(steps):
            pinned = pinned_steps(self.store, run_id)
            keys = {step: layout.checkpoint(run_id, step) for step in batch if step not in pinned}
            content = {step: data for step, key in keys.items() if (data := self._found(key)) is not None}
            deleted += self._delete(list(keys.values()))
            for step in pinned_steps(self.store, run_id) & content.keys():
                self.store.put_if_absent(keys[step], content[step])
                deleted -= 1
        return deleted

    def _needed(self, committed: int) -> set[str] | None:
        """The keys of all indexes and packs that a checkpoint, a damaged one, a pin or a reader needs. None if this is
        unknown."""
        run_id, needed = self.attempt.run_id, set[str]()
        damaged = steps_in(self.store, layout.damaged(run_id))
        try:
            marked = self._read_roots(self._live_marks())
            pinned = self._read_pins()
            roots = self._read_roots(self.store.list(layout.run(run_id, "checkpoints/step-")))
            if not any(root.step == committed for root in roots.values()):  # saves in flight may refer to it
                log.warning("run %s: the checkpoint at step %d is gone; no pack is deleted", run_id, committed)
                return None
            void = _void_among(roots.values(), committed)
            for root in [*marked.values(), *(root for root in roots.values() if root.step not in void)]:
                needed |= self._needed_by(root)
            for root in pinned:
                needed |= self._needed_by(root, damaged=root.step in damaged)
        except DataError as error:  # it may need anything
            log.warning("%s; no pack is deleted while it lies there", error)
            return None
        for step in damaged:
            key = layout.damaged(run_id, step)
            try:
                if (data := self._found(key)) is not None:
                    needed |= self._needed_by(Manifest.from_bytes(data, key), damaged=True)
            except UnfitError as error:
                log.warning("%s; no pack is deleted while it lies there", error)
                return None
            except DataError:  # torn itself: its needs are unknown
                continue
        self._roots = {**marked, **roots}
        self._needs = {digest: needs for digest, needs in self._needs.items() if needs.keys & needed}
        return needed

    def _void(self, committed: int) -> set[int]:
        """The steps of readable roots that a replaced attempt wrote too late: see `lineage`."""
        roots: dict[str, Manifest] = {}
        for info in self.store.list(layout.run(self.attempt.run_id, "checkpoints/step-")):
            with suppress(DataError):
                roots |= self._read_roots([info])
        self._roots |= roots
        return _void_among(roots.values(), committed)

    def _read_roots(self, infos: Iterable[ObjectInfo]) -> dict[str, Manifest]:
        """Roots by key and version, without those deleted since. Raises DataError."""
        roots = {}
        for info in infos:
            identity = f"{info.key} {info.version}"
            if identity in self._roots:
                roots[identity] = self._roots[identity]
            elif (data := self._found(info.key)) is not None:
                roots[identity] = Manifest.from_bytes(data, info.key)
        return roots

    def _read_pins(self) -> list[Manifest]:
        """The roots in all pins. Raises DataError for a pin that cannot be read: it may need anything."""
        pins = {}
        for info in self.store.list(layout.pins(self.attempt.run_id)):
            identity = f"{info.key} {info.version}"
            if identity in self._pinned:
                pins[identity] = self._pinned[identity]
            elif (data := self._found(info.key)) is not None:
                record = PinRecord.from_bytes(data, info.key)
                pins[identity] = tuple(Manifest.from_bytes(root.encode(), info.key) for root in record.roots)
        self._pinned = pins
        return [root for roots in pins.values() for root in roots]

    def _needed_by(self, root: Manifest, damaged: bool = False) -> set[str]:
        """The keys that one checkpoint needs; for a damaged one, as far as it can be read. Of a writer's index in a
        large tree only the name is needed: the node above it has its packs."""
        borrowed = root.holder != self.attempt.run_id  # what it needs is pinned in the run that holds it
        keys, waiting = set[str](), [(entry, False) for entry in root.indexes if not borrowed]
        while waiting:
            entry, packs_known = waiting.pop()
            keys.add(layout.index(root.holder, entry.name))
            if packs_known and not entry.is_node:
                continue
            if (needs := self._needs.get(entry.digest)) is None:
                try:
                    needs = self._read_needs(root.holder, entry)
                except UnfitError:
                    raise
                except DataError:
                    if not damaged and self.store.stat(layout.index(root.holder, entry.name)) is not None:
                        raise
                    continue  # lost objects need nothing more, and block no collection
                self._needs[entry.digest] = needs
            keys |= needs.keys
            waiting += [(entry_below, True) for entry_below in needs.below]
        return keys

    def _read_needs(self, run_id: str, entry: Entry) -> _Needs:
        child = fetch_child(self.store, layout.index(run_id, entry.name), entry)
        packs = frozenset(layout.pack(run_id, str(name)) for name in child.pack_names)
        return _Needs(packs, child.entries if isinstance(child, Node) else ())

    def _live_marks(self) -> list[ObjectInfo]:
        """The marks of readers, without those that this collector has seen without a sign of life for MARK_SECONDS by
        its own clock: they are deleted."""
        now, live, dead = self.clock.monotonic(), [], []
        marks = {info.key: info for info in self.store.list(layout.readers(self.attempt.run_id))}
        self._marks = {key: sighting for key, sighting in self._marks.items() if key in marks}
        for key, info in marks.items():
            sign = info.version, info.modified  # the same bytes written again keep their entity tag in a bucket
            last, since = self._marks.setdefault(key, (sign, now))
            if last != sign:
                self._marks[key] = sign, now
                live.append(info)
            elif now - since < MARK_SECONDS:
                live.append(info)
            else:
                dead.append(key)
        self._delete(dead)
        return live

    def _fold_telemetry(self) -> None:
        """Periodically fold the segments of the history and the events. Each commit adds one segment, each process one
        event file."""
        if self.folds and self._collections % FOLD_EVERY == 0:
            fold_events(self.store, self.attempt.run_id, self._require_lease)
            fold_history(self.store, self.attempt.run_id, self.attempt.number, self._require_lease)
        self._collections += 1

    def _require_lease(self) -> None:
        self.attempt.check(self.store)
        self._lease.renew()

    def _end_abandoned(self) -> None:
        now = self.clock.monotonic()
        if self._ended is None or now - self._ended >= ABANDONED_SECONDS:
            self._ended = now
            self.store.end_abandoned(layout.run(self.attempt.run_id))

    def _delete(self, keys: Sequence[str]) -> int:
        for batch in _batches(keys):
            self._require_lease()
            self.store.delete_many(batch)
        return len(keys)

    def _found(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except MissingError:
            return None

    def _keys(self, prefix: str) -> list[str]:
        return [info.key for info in self.store.list(prefix)]


def _void_among(roots: Iterable[Manifest], committed: int) -> set[int]:
    by_step = {root.step: root for root in roots}
    if committed not in by_step:
        return set()
    return void_steps(by_step[committed], {step: root.attempt for step, root in by_step.items()})


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


def steps_in(store: Store, folder: str) -> list[int]:
    """The steps of the roots in a folder, oldest first. Other objects are ignored."""
    matches = (re.search(r"/step-(\d{9,})\.json$", info.key) for info in store.list(f"{folder}step-"))
    return sorted(int(match[1]) for match in matches if match)


def _is_old(pattern: re.Pattern[str], key: str, newest: tuple[int, int]) -> bool:
    """Whether an object is no newer than the newest commit. A newer one may be part of a save in flight."""
    match = pattern.search(key)
    return match is not None and (int(match[1]), int(match[2])) <= newest
