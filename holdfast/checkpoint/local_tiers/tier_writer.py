"""Writing one writer's part to a local tier: its newest two steps, and a third one while it is written.

Two steps are kept because ranks are not equally far. While one writes step n + 1, another may still write step n; then
n - 1 is the newest step that all have. A step is written anew, packs and index, and references no other one. Failures
are logged and fail no save.

The record of a step says what a root would say apart from tensors. Writer 0 keeps it with its part. It contains its
own digest, and one that does not match it is ignored.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.fingerprint import StateDigest
from holdfast.checkpoint.local_tiers.tier import Tier, require_room, touch
from holdfast.checkpoint.manifest import content_digest
from holdfast.checkpoint.shard_writer import ShardWriter, writer_name
from holdfast.spec.errors import DataError, NoSpaceError
from holdfast.spec.json_parsing import parse_json_object
from holdfast.spec.plan import Segment
from holdfast.store import Store, layout

log = logging.getLogger("holdfast.checkpoint")

KEPT = 2  # whole steps of a writer
MARGIN = 1 << 20  # bytes for the index and the record of a step
_STEP = re.compile(r"/(?:indexes|packs)/(\d{6,})-(\d{9,})[-/]")

Step = tuple[int, int]  # attempt, step


class Record(BaseModel, extra="forbid", frozen=True):
    """A local-tier step."""

    run_id: str
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    writers: int = Field(ge=1)
    created: float  # Unix seconds
    describe: dict[str, Any]  # fields of a manifest that do not change: dataset_id, layout, random
    segments: tuple[Segment, ...] = ()
    history: tuple[tuple[int, int], ...] = ()
    scalars: dict[str, int | float] = {}
    attachments: dict[str, str] = {}  # objects that a commit would write: key -> text

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the plan that it was computed under; empty if unknown."""
        return self.segments[-1].fingerprint if self.segments else ""

    def to_bytes(self) -> bytes:
        """The record as it is stored."""
        body = self.model_dump_json().encode()
        return content_digest(body).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, data: bytes, source: str) -> Record:
        """Read a stored record. Raises DataError for anything but an intact one."""
        stored_digest, _, body = data.partition(b"\n")
        if stored_digest != content_digest(body).encode():
            raise DataError(f"{source}: the record does not match its digest")
        try:
            return cls.model_validate(parse_json_object(body, source))
        except ValidationError as error:
            raise DataError(f"{source}: the record is not valid: {error}") from None


def record_key(run_id: str, attempt: int, step: int) -> str:
    """The key at which writer 0 keeps it."""
    return f"{layout.indexes(run_id, attempt, step)}record.json"


class TierWriter:
    """Keeps the part of one writer of an attempt in one tier."""

    def __init__(
        self, tier: Tier, attempt: Attempt, writer: int, send: Callable[[Step], None] = lambda _: None
    ) -> None:
        """`send` is called with each step once it is complete."""
        self._send = send
        self.tier, self._attempt, self._writer = tier, attempt, writer
        self._store = tier.store(writer)
        self._shards = ShardWriter(self._store, attempt, writer)
        self._written = 0  # whole steps, by this process
        self.off = ""  # why nothing is kept any more

    def keep(
        self, step: int, boxes: Sequence[TensorBox], digest: StateDigest | None, record: Record | None
    ) -> StateDigest | None:
        """Keep a step. Return the state digest of the boxes. `record` is given for writer 0. Raises nothing, except for
        a bug."""
        if self.off:
            return digest
        size = sum(box.data.nbytes for box in boxes) + MARGIN
        try:
            if not self._written:
                self._store.end_abandoned(layout.run(self._attempt.run_id), 0.0)  # left by a writer that was killed
            require_room(self.tier, size)
            if record is not None:  # first: a step that has an index is whole
                self._store.put(record_key(record.run_id, record.attempt, step), record.to_bytes())
            self._shards.forget()
            index = self._shards.write(step, boxes, digest)
            touch(self.tier.folder)
            self._written += 1
            prune(self._store, self._attempt.run_id, self._writer)
            if self._written > KEPT:
                self._prune_others()
            self._send((self._attempt.number, step))
        except (NoSpaceError, PermissionError) as error:
            self.off = str(error)
            log.warning("%s", error)
        except Exception as error:  # noqa: BLE001 - a near tier is a help, and no condition of training
            reason = f"{type(error).__name__} {error}"
            log.warning("step %d is not kept in checkpoint.%s: %s", step, self.tier.name, reason)
            with suppress(Exception):
                prune(self._store, self._attempt.run_id, self._writer)
        else:
            return index.header.totals.digest
        return digest

    def _prune_others(self) -> None:
        """Remove the copies that older attempts left for writers that are elsewhere now, or gone. This attempt's gang
        has kept a whole step since."""
        for writer in self.tier.writers():
            store = self.tier.store(writer)
            old = [step for step in steps_in(store, self._attempt.run_id) if step[0] < self._attempt.number]
            _remove(store, self._attempt.run_id, old)


def prune(store: Store, run_id: str, writer: int) -> None:
    """Remove all copies of a writer except its newest whole steps and newer, unfinished ones."""
    whole = whole_steps(store, run_id, writer)
    if len(whole) >= KEPT:
        oldest = whole[-KEPT]
        _remove(store, run_id, [step for step in steps_in(store, run_id) if step < oldest])


def whole_steps(store: Store, run_id: str, writer: int) -> list[Step]:
    """The steps with this writer's index, which is written last, oldest first."""
    own = f"/{writer_name(writer)}.idx"
    keys = [info.key for info in store.list(layout.indexes(run_id)) if info.key.endswith(own)]
    return sorted({(int(match[1]), int(match[2])) for key in keys if (match := _STEP.search(key))})


def steps_in(store: Store, run_id: str) -> set[Step]:
    """The steps with any object."""
    keys = [info.key for folder in (layout.indexes(run_id), layout.packs(run_id)) for info in store.list(folder)]
    return {(int(match[1]), int(match[2])) for key in keys if (match := _STEP.search(key))}


def _remove(store: Store, run_id: str, steps: Sequence[Step]) -> None:
    """Remove indexes first, so that a half-removed step does not look whole."""
    removed = set(steps)
    for folder in (layout.indexes(run_id), layout.packs(run_id)):
        keys = [info.key for info in store.list(folder)]
        store.delete_many(
            [key for key in keys if (match := _STEP.search(key)) and (int(match[1]), int(match[2])) in removed]
        )


def clear(tier: Tier) -> None:
    """Remove all that a tier has of the run on this node."""
    shutil.rmtree(Path(tier.folder), ignore_errors=True)
