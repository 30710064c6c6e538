"""Loading from local tiers: the ranks agree on the newest step that is complete over all of its writers, and read it.

The run's store decides which steps count. The step must be above that of the newest checkpoint, and its attempt must
not have been replaced at that step. Each attempt with local tiers records the step that it began from; copies of older
attempts above that step do not count. Coverage and state digest add up over the writers' indexes as in a commit. Each
piece is compared with its digest as it is read. Torn, missing or wrong copies are logged. The next older step is tried
then, or the checkpoint in the store.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from pydantic import BaseModel, Field

from holdfast.checkpoint.attempts import list_attempts
from holdfast.checkpoint.catalogue import BoxSource, Catalogue, boxes_for, catalogue_bytes, merged
from holdfast.checkpoint.commit import node_name, require_whole
from holdfast.checkpoint.fingerprint import scalars_digest
from holdfast.checkpoint.index import Header, Index, Totals, pack_table
from holdfast.checkpoint.local_tiers.peers import Nodes, Remote
from holdfast.checkpoint.local_tiers.tier import Tier
from holdfast.checkpoint.local_tiers.tier_writer import Record, Step, record_key, whole_steps
from holdfast.checkpoint.manifest import Manifest, content_digest
from holdfast.checkpoint.reader import Checkpoint
from holdfast.checkpoint.shard_writer import writer_name
from holdfast.checkpoint.tree import FANOUT, Children, Entry, Node
from holdfast.collectives import Gang
from holdfast.spec.errors import DataError, HoldfastError, MissingError
from holdfast.store import Read, Store, layout
from holdfast.store.interface import WHOLE_BYTES
from holdfast.store.json_reading import read_json
from holdfast.store.parallel import read_many

# A local-tier step as a store for the checkpoint reader: its objects lie on several nodes.
#
# The writer of an object determines its node. The index that names a pack determines the pack's writer, and a reader
# always reads the index first.


class Source(Protocol):
    """The source of one writer's part: a store, or the subset of its methods that a reader needs."""

    def get(self, key: str) -> bytes:
        """A whole object."""

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """A part of one."""


class TierView:
    """Reads the objects of one local-tier step. Has only the methods of `Store` that this needs."""

    def __init__(
        self, url: str, run_id: str, indexes: Mapping[str, Sequence[Source]], nodes: Mapping[str, bytes]
    ) -> None:
        """`url` names it in messages. `indexes` maps the key of each index to its sources, the nearest first. `nodes`
        has the nodes above them."""
        self.url, self._run_id, self._indexes, self._nodes = url, run_id, indexes, nodes
        self._packs: dict[str, Sequence[Source]] = {}

    def get(self, key: str, *, most: int = WHOLE_BYTES) -> bytes:  # noqa: ARG002 - each source has its own bound
        """See Store: an index, or a node above."""
        if key in self._nodes:
            return self._nodes[key]
        sources = self._indexes.get(key, ())
        failure: HoldfastError = MissingError(f"{key}: is no part of {self.url} that this node can reach")
        for source in sources:
            try:
                data = source.get(key)
                for name in Index.from_bytes(data, key).pack_names:
                    self._packs[layout.pack(self._run_id, str(name))] = sources
            except HoldfastError as error:
                failure = error
            else:
                return data
        raise failure

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See Store; for a pack. A reader calls it after damage in the result of `read_many`, so the next source is
        tried first."""
        sources = self._packs.get(key, ())
        self._read([*sources[1:], *sources[:1]], key, start, target)

    def read_many(self, reads: Iterable[Read]) -> None:
        """See Store."""
        read_many(lambda key, start, target: self._read(self._packs.get(key, ()), key, start, target), reads)

    def _read(self, sources: Sequence[Source], key: str, start: int, target: memoryview) -> None:
        failure: HoldfastError = MissingError(f"{key}: is no part of {self.url} that this node can reach")
        for source in sources:
            try:
                source.read_into(key, start, target)
            except HoldfastError as error:
                failure = error
            else:
                return
        raise failure


log = logging.getLogger("holdfast.checkpoint")

TRIES = 4  # local-tier steps that are tried before the store's checkpoint

Held = Mapping[tuple[str, int, int], Sequence[int]]  # tier, attempt, step -> the writers with a part here
_Inventory = list[tuple[tuple[str, int, int], list[int]]]  # the same, as it is sent to the other ranks


@dataclass(frozen=True)
class Part:
    """One writer's part of a local-tier step, whose index its holder has verified."""

    writer: int
    tier: str
    entry: Entry
    totals: Totals


@dataclass(frozen=True)
class Found:
    """A local-tier step that was loaded."""

    checkpoint: Checkpoint
    record: Record


class TierLoader:
    """The local-tier steps of a run, as the ranks of a new attempt find them."""

    def __init__(
        self, store: Store, run_id: str, attempt: int, tiers: Sequence[Tier], gang: Gang, nodes: Nodes
    ) -> None:
        """Collective, as are the methods below. `tiers`: those of this node."""
        self._store, self._run_id, self._attempt, self._gang, self._nodes = store, run_id, attempt, gang, nodes
        self._tiers: dict[str, Tier] = {tier.name: tier for tier in tiers}
        self._leads = nodes.leads  # the first rank of each node reports for it
        self._held = [
            dict(inventory)
            for inventory in gang.all_gather(list((self._inventory() if self._leads else {}).items()), _Inventory)
        ]

    def load(self, boxes: BoxSource, newest: Step | None, fits: Callable[[Record], bool]) -> Found | None:
        """Fill `boxes` from the newest local-tier step above `newest`, the attempt and step of the newest checkpoint.
        The step must be complete, verify on every rank, and have a record that `fits`. Return None without such a step;
        the contents of the boxes are then undefined."""
        for attempt, step in self._gang.from_rank_0(lambda: self._candidates(newest), list[Step])[:TRIES]:
            candidate = self._opened(attempt, step, fits)
            if candidate is None:
                continue
            reason = self._filled(candidate.checkpoint, boxes)
            reasons = [text for text in self._gang.all_gather(reason, str) if text]
            if not reasons:
                return candidate
            self._say("step %d of the near tiers does not verify, and is left alone: %s", step, reasons[0])
        return None

    def _inventory(self) -> Held:
        inventory: dict[tuple[str, int, int], list[int]] = {}
        for tier in self._tiers.values():
            for writer in tier.writers():
                with suppress(Exception):  # what cannot be listed does not count
                    for attempt, step in whole_steps(tier.store(writer), self._run_id, writer):
                        inventory.setdefault((tier.name, attempt, step), []).append(writer)
        return inventory

    def _candidates(self, newest: Step | None) -> list[Step]:
        """The steps that may be loaded, newest first. On rank 0."""
        steps = {(attempt, step) for inventory in self._held for _, attempt, step in inventory}
        if newest is not None:
            steps = {(attempt, step) for attempt, step in steps if step > newest[1] and attempt >= newest[0]}
        steps = {pair for pair in steps if pair[0] < self._attempt}
        if not steps:
            return []
        oldest = min(attempt for attempt, _ in steps)
        for number, _ in list_attempts(self._store, self._run_id):
            if oldest < number < self._attempt and (began := read_start(self._store, self._run_id, number)) is not None:
                steps = {(attempt, step) for attempt, step in steps if attempt >= number or step <= began}
        return sorted(steps, key=lambda each: (each[1], each[0]), reverse=True)

    def _opened(self, attempt: int, step: int, fits: Callable[[Record], bool]) -> Found | None:
        """A local-tier step as a checkpoint, if it is complete."""
        record = self._record(attempt, step)
        if record is None or not fits(record):
            return None
        indexes = self._indexes(attempt, step) if self._leads else {}
        try:
            catalogue = self._catalogue(indexes)
            parts = self._parts(indexes, catalogue)
            missing = sorted(set(range(record.writers)) - parts.keys())
            if missing:
                raise DataError(f"the parts of {len(missing)} of {record.writers} writers are missing: {missing[:8]}")
            entries = [parts[writer][0][1].entry for writer in range(record.writers)]
            sums = [parts[writer][0][1].totals for writer in range(record.writers)]
            totals = sum(sums, Totals())
            require_whole(step, catalogue, totals, record.writers)
            nodes: dict[str, bytes] = {}
            top = self._tree(record, catalogue, entries, sums, nodes)
            manifest = Manifest(
                run_id=self._run_id,
                step=step,
                attempt=attempt,
                created=record.created,
                segments=record.segments,
                history=record.history,
                scalars=record.scalars,
                state_digest=str(totals.digest + scalars_digest(record.scalars)),
                tensors=dict(catalogue),
                indexes=top,
                writers=record.writers,
                **record.describe,
            )
        except (DataError, ValueError, TypeError) as error:  # the same on every rank: all have the same input
            self._say("step %d of the near tiers is not used: %s", step, error)
            return None
        view = TierView(f"near step {step}", self._run_id, self._sources(parts), nodes)
        return Found(Checkpoint(cast(Store, view), manifest), record)

    def _record(self, attempt: int, step: int) -> Record | None:
        """Writer 0's record, from the first node that can read it."""
        key = record_key(self._run_id, attempt, step)
        for rank, inventory in enumerate(self._held):
            names = [name for name in self._names if 0 in inventory.get((name, attempt, step), ())]
            for name in names:
                record = None
                if rank == self._gang.rank:
                    try:
                        record = Record.from_bytes(self._tiers[name].store(0).get(key), key)
                        if (record.run_id, record.attempt, record.step) != (self._run_id, attempt, step):
                            raise DataError(f"{key}: is the record of attempt {record.attempt}, step {record.step}")
                    except Exception as error:  # noqa: BLE001 - a rank that cannot read it has none
                        record = None
                        log.warning("%s", error)
                if (received := self._gang.broadcast(record, Record | None, rank)) is not None:
                    return received
        return None

    def _indexes(self, attempt: int, step: int) -> dict[tuple[int, str], bytes]:
        """The intact indexes of a step on this node whose packs exist, by writer and tier."""
        indexes: dict[tuple[int, str], bytes] = {}
        for name, tier in self._tiers.items():
            for writer in self._held[self._gang.rank].get((name, attempt, step), ()):
                store, key = tier.store(writer), self._key(attempt, step, writer)
                try:
                    data = store.get(key)
                    index = Index.from_bytes(data, key)
                    header = index.header
                    if (header.step, header.attempt, header.level, header.number) != (step, attempt, 0, writer):
                        raise DataError(f"{key}: says that it is of another writer or step")
                    for pack in index.pack_names:
                        info = store.stat(layout.pack(self._run_id, str(pack)))
                        if info is None or info.size < pack.size:
                            raise MissingError(f"{key}: pack {pack} is gone, or too short")
                    indexes[writer, name] = data
                except Exception as error:  # noqa: BLE001 - what cannot be read is not there
                    log.warning("a copy in checkpoint.%s is not used: %s", name, error)
        return indexes

    def _catalogue(self, indexes: Mapping[tuple[int, str], bytes]) -> Catalogue:
        """The tensors of all writers. Equal catalogues of several nodes are sent once."""
        own: Catalogue = {}
        with suppress(DataError):  # a node whose parts do not agree has none
            own = merged((Index.from_bytes(data, "near").catalogue for data in indexes.values()), "this node")
        digests = self._gang.all_gather(content_digest(catalogue_bytes(own)) if own else "", str)
        distinct = {digest: digests.index(digest) for digest in digests if digest}
        catalogues = [self._gang.broadcast(own, Catalogue, rank) for rank in distinct.values()]
        return merged(catalogues, "the near tiers")

    def _parts(
        self, indexes: Mapping[tuple[int, str], bytes], catalogue: Catalogue
    ) -> dict[int, list[tuple[int, Part]]]:
        """For each writer, its copies with the rank that reports for the node, the nearest tier first. Copies that
        differ from the first are left out."""
        own = []
        for (writer, name), data in indexes.items():
            children = Children("near")
            key = self._name(Index.from_bytes(data, "near").header)
            children.add(key, data)
            own.append(Part(writer, name, children.entries(catalogue)[0], children.totals))
        by_writer: dict[int, list[tuple[int, Part]]] = {}
        by_rank = self._gang.all_gather(own, list[Part])
        all_parts = [(rank, part) for rank, parts in enumerate(by_rank) for part in parts]
        for rank, part in sorted(all_parts, key=lambda each: self._names.index(each[1].tier)):
            copies = by_writer.setdefault(part.writer, [])
            if not copies or copies[0][1].entry.digest == part.entry.digest:
                copies.append((rank, part))
        return by_writer

    def _tree(
        self,
        record: Record,
        catalogue: Catalogue,
        entries: Sequence[Entry],
        totals: Sequence[Totals],
        nodes: dict[str, bytes],
    ) -> tuple[Entry, ...]:
        """The entries of a root above these. The nodes between are put into `nodes`. Their tables of packs are empty,
        since they have no reader."""
        level = 0
        while len(entries) > FANOUT:
            level += 1
            above: list[Entry] = []
            sums: list[Totals] = []
            for number, start in enumerate(range(0, len(entries), FANOUT)):
                group = sum(totals[start : start + FANOUT], Totals())
                header = Header(record.step, record.attempt, number, level, group)
                node = Node(header, catalogue, pack_table([]), tuple(entries[start : start + FANOUT]))
                name = f"{record.attempt:06d}-{record.step:09d}/{node_name(level, number)}.idx"
                children, data = Children("near"), node.to_bytes()
                children.add(name, data)
                nodes[layout.index(self._run_id, name)] = data
                above += children.entries(catalogue)
                sums.append(group)
            entries, totals = above, sums
        return tuple(entries)

    def _sources(self, parts: Mapping[int, Sequence[tuple[int, Part]]]) -> dict[str, list[Source]]:
        """The sources of each writer's index and packs for this rank, by the key of the index: its own node first."""
        sources: dict[str, list[Source]] = {}
        for writer, copies in parts.items():
            local: list[Source] = []
            remote: list[Source] = []
            for rank, part in copies:
                if self._nodes.names[rank] == self._nodes.here and part.tier in self._tiers:
                    local.append(self._tiers[part.tier].store(writer))
                elif (endpoint := self._nodes.endpoints[rank]) is not None:
                    remote.append(Remote(endpoint, part.tier, writer))
            sources[layout.index(self._run_id, copies[0][1].entry.name)] = [*local, *remote]
        return sources

    def _filled(self, checkpoint: Checkpoint, boxes: BoxSource) -> str:
        """Fill this rank's boxes. Return the reason of a failure, or an empty string."""
        try:
            checkpoint.fill(boxes_for(boxes, checkpoint.tensors))
        except Exception as error:  # noqa: BLE001 - there is the checkpoint in the store
            return f"rank {self._gang.rank}: {error}"
        return ""

    @property
    def _names(self) -> Sequence[str]:
        return ("memory", "disk")  # the nearest first

    def _key(self, attempt: int, step: int, writer: int) -> str:
        return f"{layout.indexes(self._run_id, attempt, step)}{writer_name(writer)}.idx"

    def _name(self, header: Header) -> str:
        return f"{header.attempt:06d}-{header.step:09d}/{writer_name(header.number)}.idx"

    def _say(self, words: str, *values: object) -> None:
        if self._gang.rank == 0:
            log.warning(words, *values)


class _Began(BaseModel):
    """The step that an attempt began from, as it is stored."""

    start: int = Field(ge=0)


def read_start(store: Store, run_id: str, attempt: int) -> int | None:
    """The step that an attempt began from; None if it has not begun, or has no local tiers."""
    try:
        return read_json(store, layout.began(run_id, attempt), _Began).start
    except MissingError:
        return None
    except DataError:
        return 0  # no step of older attempts counts


def record_start(store: Store, run_id: str, attempt: int, start: int) -> None:
    """Record, before the first step of an attempt, the step that it begins from. Local-tier steps of older attempts
    above it do not count from now on. On rank 0."""
    store.put(layout.began(run_id, attempt), json.dumps({"start": start}).encode())
