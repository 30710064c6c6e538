"""Work on a copy that local tiers keep: each tier writes it, one after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.agent.protocol import SaveRequest, Writer
from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.local_tiers.peers import Neighbour
from holdfast.checkpoint.local_tiers.tier import TierLock
from holdfast.checkpoint.local_tiers.tier_writer import Record, TierWriter


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
