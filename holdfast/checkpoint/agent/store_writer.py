"""Work on a copy that a rank handed over: its share of the checkpoint in the store, and the local tiers.

The share leads to the commit on one writer. The tiers write it one after another, and never fail a save.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.checkpoint.agent.protocol import SaveRequest, Writer
from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.commit import Committer
from holdfast.checkpoint.compress import Compression
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.local_tiers.peers import Neighbour
from holdfast.checkpoint.local_tiers.tier import TierLock
from holdfast.checkpoint.local_tiers.tier_writer import Record, TierWriter
from holdfast.checkpoint.shard_writer import ShardWriter
from holdfast.checkpoint.tree import FANOUT
from holdfast.spec.errors import HoldfastError
from holdfast.store import Store, Throttle, open_store, throttled

log = logging.getLogger("holdfast.checkpoint")

PATIENCE_SECONDS = 600.0  # limit of the wait for the parts of others: all are copied after the same step
HURRY_SECONDS = 15.0  # limit of that wait once no rank runs
MOST_THREADS = 8  # limit per writer, for hashing and encoding


class StoreWriter:
    """Implements `Work` on a store."""

    def __init__(self, writer: Writer, store: Store) -> None:
        self._urgent = False
        if writer.upload_rate is not None:
            store = throttled(store, Throttle(writer.upload_rate, lambda: self._urgent))
        self._store, self._writer = store, writer
        self._attempt = Attempt(writer.run_id, writer.attempt, writer.launch)
        threads = spare_threads(writer.local_ranks)
        compression = Compression(threads) if writer.compress else None
        self._shards = ShardWriter(store, self._attempt, writer.rank, threads=threads, compression=compression)
        self._committer = Committer(store, self._attempt, writer.world, patience=PATIENCE_SECONDS)
        self._collector = Collector(store, self._attempt, writer.retention)
        self._recalled = False
        self.leads = writer.rank == 0 or (writer.world > FANOUT and writer.rank % FANOUT == 0)

    @classmethod
    def of(cls, writer: Writer) -> StoreWriter:
        """The work of a rank, from its introduction."""
        return cls(writer, open_store(writer.store))

    def write(self, request: SaveRequest, boxes: Sequence[TensorBox]) -> None:
        """See Work."""
        if not self._recalled:
            self._shards.recall(self._writer.start if self._writer.root is None else self._writer.root, boxes)
            self._recalled = True
        try:
            self._shards.write(request.step, boxes, request.digest)
        except HoldfastError:
            self._shards.forget()  # the next save writes all content anew
            raise

    def commit(self, request: SaveRequest) -> int | None:
        """See Work."""
        step = request.step
        self._committer.lead(step, self._writer.rank)
        if self._writer.rank != 0:
            return None

        def attach() -> None:
            for key, text in request.attachments.items():
                self._store.put_if_absent(key, text.encode())

        same_bits = self._writer.same_bits
        manifest = self._committer.commit(step, self._fields(), request.scalars, attach, same_bits=same_bits)
        log.info("saved step %d", step)
        return manifest.fresh

    def give_up(self, step: int, failure: HoldfastError) -> None:
        """See Work."""
        if self._writer.world > 1:
            self._shards.fail(step, failure)

    def after_commit(self, step: int) -> None:
        """See Work."""
        if self._writer.rank == 0:
            self._collector.collect(step)

    def lift(self) -> None:
        """See Work."""
        self._urgent = True

    def hurry(self) -> None:
        """See Work."""
        self._urgent = True
        self._committer.patience = HURRY_SECONDS

    def _fields(self) -> dict[str, Any]:
        """The fields of a manifest that only the run knows."""
        return {**self._writer.lineage, **self._writer.describe}


def spare_threads(ranks: int) -> int:
    """The number of threads of each writer that hash and encode. It is the writer's share of this process's cores,
    minus one core for each of the node's `ranks`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, (cores - ranks) // ranks))


class TierCopies:
    """The local tiers of one writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self.run_id, self.tiers = writer, writer.run_id, writer.near
        attempt = Attempt(writer.run_id, writer.attempt, writer.launch)
        self._writers = []
        for tier in writer.near:
            send = lambda _: None  # noqa: E731
            if writer.neighbour is not None and tier.name == "memory":
                send = Neighbour(writer.neighbour, tier, writer.run_id, writer.rank).send
            self._writers.append(TierWriter(tier, attempt, writer.rank, send))
        self._locks = []
        for tier in writer.near:
            with suppress(OSError):  # without the lock, another run may treat the folder as unused
                self._locks.append(TierLock(Path(tier.folder)))

    @classmethod
    def of(cls, writer: Writer) -> TierCopies | None:
        """The tiers of a rank, from its introduction; None if it has none."""
        return cls(writer) if writer.near else None

    def keep(self, request: SaveRequest, boxes: Sequence[TensorBox]) -> StateDigest | None:
        """Keep a step in the tiers of the request. Return the state digest of the boxes, where it is known. Never
        fails."""
        record = None
        if self._writer.rank == 0:
            record = Record(
                run_id=self._writer.run_id,
                step=request.step,
                attempt=self._writer.attempt,
                writers=self._writer.world,
                created=time.time(),
                describe=self._writer.describe,
                scalars=request.scalars,
                attachments=request.attachments,
                **self._writer.lineage,
            )
        digest = request.digest
        for keeper in self._writers:
            if keeper.tier.name in request.tiers:
                digest = keeper.keep(request.step, boxes, digest, record)
        return digest
