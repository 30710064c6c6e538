"""The local tiers of an attempt: their folders, when they are due, and the step found in them."""

import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.catalogue import BoxSource
from holdfast.checkpoint.lineage import newest_commit
from holdfast.checkpoint.local_tiers.peers import Nodes
from holdfast.checkpoint.local_tiers.tier import (
    STALE_SECONDS,
    Tier,
    life_of,
    make_folder,
    memory_base,
    remove_stale,
)
from holdfast.checkpoint.local_tiers.tier_loader import Found, TierLoader, record_start
from holdfast.checkpoint.local_tiers.tier_writer import Record, clear
from holdfast.collectives import Gang
from holdfast.store import Store

TIERS: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")  # the nearest first
log = logging.getLogger("holdfast.checkpoint")


class TierSet:
    """The local tiers of an attempt, on one rank. Everything but `due` and `tiers` is collective."""

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        gang: Gang,
        every: Mapping[str, int],
        disk: str | None = None,
        peers: int = 0,
    ) -> None:
        """`every`: the steps between two copies, by the name of the tier. `disk`: the folder of that tier. `peers`: how
        many other nodes keep copies of this node's memory tier."""
        self._store, self._attempt, self._gang, self._every = store, attempt, gang, dict(every)
        life = gang.from_rank_0(lambda: life_of(store, attempt.run_id), str)
        placed = [_placed(name, disk, f"{attempt.run_id}-{life}", every[name]) for name in TIERS if name in every]
        self.tiers = tuple(tier for tier in placed if tier is not None)
        self._nodes = Nodes(gang, self.tiers)
        self._peers = peers
        self.neighbour = self._nodes.neighbour if peers else None
        self.root = 0  # the step of the newest checkpoint in the store

    def due(self, step: int) -> tuple[str, ...]:
        """The tiers that keep the state after `step`; the same on every rank."""
        return tuple(name for name, every in self._every.items() if step % every == 0)

    def load(self, boxes: BoxSource, fingerprint: str) -> Found | None:
        """Fill `boxes` from the newest local-tier step that is newer than the newest checkpoint and has the plan of
        this fingerprint. Return None without one; the contents of the boxes are then undefined."""
        run_id, number = self._attempt.run_id, self._attempt.number
        newest = self._gang.from_rank_0(lambda: newest_commit(self._store, run_id, number), tuple[int, int] | None)
        self.root = newest[1] if newest is not None else 0

        def fits(record: Record) -> bool:
            return record.fingerprint == fingerprint

        with self._nodes.served(run_id, self.tiers):
            near = TierLoader(self._store, run_id, number, self.tiers, self._gang, self._nodes)
            loaded = near.load(boxes, newest, fits)
        if loaded is not None and self._gang.rank == 0:
            log.info("going on from step %d, kept near the ranks; the store has step %d", loaded.record.step, self.root)
        return loaded

    def begin(self, start: int, found: Found | None) -> None:
        """Before the first step, write the attachments of a loaded local-tier step and the start of this attempt to the
        store."""

        def write() -> None:
            for key, text in (found.record.attachments if found is not None else {}).items():
                self._store.put_if_absent(key, text.encode())
            record_start(self._store, self._attempt.run_id, self._attempt.number, start)

        self._gang.from_rank_0(write)

    def listener(self) -> tuple[socket.socket, str] | None:
        """The listener through which this node's agent accepts copies of other nodes, and its token. On one rank of
        each node, and once."""
        handed = self._nodes.handed_over()
        if handed is not None and not self._peers:
            handed[0].close()  # no longer needed: all have loaded
            return None
        return handed

    def clear(self) -> None:
        """Remove the tiers after the last step is committed. Waits for all ranks to agree."""
        self._gang.barrier()
        for tier in self.tiers:
            clear(tier)


def _placed(name: Literal["memory", "disk"], disk: str | None, folder: str, every: int) -> Tier | None:
    """A tier on this node; None where its folder cannot be made."""
    try:
        base = memory_base() if name == "memory" else Path(disk or "")
        place = make_folder(base, folder)
        remove_stale(base, folder, STALE_SECONDS[name])
    except OSError as error:
        log.warning("checkpoint.%s: nothing is kept on this node: %s", name, error)
        return None
    return Tier(name=name, folder=str(place), every=every)
