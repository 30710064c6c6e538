"""Saving: copy the state, let training go on, and commit in the background.

The order of a commit, on every path: packs durable → every rank's inventory agreed → metrics of the steps up to here
written → fencing token checked → manifest put-if-absent. The manifest is the commit; what a crash leaves before it is
garbage that the next sweep removes; the sweep comes after the commit and never judges it. A state that is not finite is
never committed. What the store refuses for a while is tried again at the next save, within a stated lag.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from holdfast.components.checkpoint.attempts import Attempt
from holdfast.components.checkpoint.box import TensorBox, as_bytes
from holdfast.components.checkpoint.fingerprint import StateDigest, digest_of, scalars_digest
from holdfast.components.checkpoint.manifest import Manifest, Piece, TensorRecord, UnfitError, content_digest
from holdfast.components.checkpoint.reader import load_newest
from holdfast.components.checkpoint.retention import Retention, sweep
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import (
    DataError,
    DivergedError,
    FencedError,
    HoldfastError,
    NoSpaceError,
    StoreUnreachableError,
)
from holdfast.components.spec.plan import Plan, Segment, continued
from holdfast.components.store import ConflictError, Store, layout
from holdfast.components.telemetry import emit
from holdfast.components.telemetry.events import SaveCommitted, SaveFailed

log = logging.getLogger("holdfast.checkpoint")

PACK_BYTES = 256 * 2**20
STORE_FAULTS = (StoreUnreachableError, NoSpaceError)  # which may have passed by the next save


@dataclass(frozen=True)
class _Placed:
    """A piece of a tensor with its place in the store: what one rank tells rank 0."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    piece: Piece


@dataclass
class _Report:
    """What one rank says when its packs are durable, or why they are not."""

    placed: list[_Placed] = field(default_factory=list)
    digest: StateDigest = field(default_factory=StateDigest)  # of this rank's part
    failure: HoldfastError | None = None


class Checkpointer:
    """Saves the boxes of a gang. All methods are collective; one save is in flight at most."""

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        retention: Retention,
        *,
        describe: dict[str, Any],
        plan: Plan | None = None,
        max_lag_steps: int = 0,
        same_bits: bool = True,
        on_commit: Callable[[int], None] | None = None,
        gang: Gang | None = None,
    ) -> None:
        """`describe` gives the manifest's fields that do not change (dataset_id, layout, random), `plan` how this gang
        computes, which becomes a segment of the run unless the checkpoint it goes on from has the same. While the store
        takes no checkpoint, saves go on until they are `max_lag_steps` beyond the newest one. With `same_bits` another
        attempt must have committed the same for a step. `on_commit(step)`, which may be set later, runs on rank 0
        just before the manifest is written; `gang` is one that nobody else talks on (default: a new one)."""
        self._store, self._attempt, self._retention = store, attempt, retention
        self._describe, self.on_commit = describe, on_commit
        self._plan, self._start = plan, 0
        self._segments: tuple[Segment, ...] = ()  # of the checkpoint that was loaded
        self._history: tuple[tuple[int, int], ...] = ()  # and its history
        self._max_lag_steps, self._same_bits = max_lag_steps, same_bits
        self._committed = 0  # the newest step that is safe
        self._gang = gang or Gang()
        self._known: dict[str, tuple[str, int]] = {}  # digest -> pack and start, in the checkpoint last saved or loaded
        self._staging: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._failure: HoldfastError | None = None
        self.failed_saves = 0  # that the store did not take, and training went on
        self._packs: set[str] = set()  # that the checkpoint last committed or loaded refers to
        self._begun = self._stalled = 0.0  # when the save in flight began, and how long training waited for it
        self.stall_seconds = 0.0  # time that training waited for saves, in this process

    def restore(
        self,
        boxes: Sequence[TensorBox],
        first_state: Callable[[Sequence[TensorBox]], None],
        accept: Callable[[Manifest], None] = lambda _: None,
    ) -> int:
        """Fill `boxes` from the newest checkpoint that verifies, or with `first_state` when there is none yet; the step
        of what they hold. Raises what `load_newest` raises, and what `accept` raises for the checkpoint found."""
        attempt, fence = self._attempt, partial(self._attempt.check, self._store)
        manifest = load_newest(self._store, attempt.run_id, boxes, self._gang, attempt.number, fence)
        if manifest is None:
            first_state(boxes)
            return 0
        accept(manifest)
        self.adopt(manifest)
        return manifest.step

    def adopt(self, manifest: Manifest) -> None:
        """Go on from a checkpoint that has just been loaded and verified: later saves refer to its pieces."""
        self._start, self._segments, self._history = manifest.step, manifest.segments, manifest.history
        self._committed = manifest.step
        self._known = {
            piece.digest: (piece.pack, piece.start) for record in manifest.tensors.values() for piece in record.pieces
        }
        self._packs = {pack for pack, _ in self._known.values()}

    def save(self, step: int, boxes: Sequence[TensorBox], scalars: dict[str, float | int]) -> None:
        """Save `boxes`, which together with the other ranks' make up every tensor exactly once. Returns when the state
        has been copied; the commit goes on behind. Raises what the save before this one failed with, unless it is a
        fault of the store and this step is within `max_lag_steps` of the newest checkpoint."""
        begun = time.perf_counter()
        self._join()
        if isinstance(self._failure, STORE_FAULTS) and step - self._committed <= self._max_lag_steps:
            self.failed_saves += 1
            if self._gang.rank == 0:
                log.warning(
                    "a checkpoint was not saved, and step %d is tried now; the newest one is that of step %d: %s",
                    step, self._committed, self._failure,
                )  # fmt: skip
            self._failure, self._known = None, {}  # whatever it had referred to is written anew
        self.wait()
        digest = digest_of(boxes) if _on_accelerator(boxes) else None  # a CPU does it behind, from the copies
        copies = self._copy(boxes)
        self._begun, self._stalled = begun, time.perf_counter() - begun
        self._thread = threading.Thread(
            target=self._commit, args=(step, copies, digest, scalars), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.stall_seconds += self._stalled

    def wait(self) -> None:
        """Wait for the save in flight. Raises what it failed with, on every rank."""
        self._join()
        if self._failure is not None:
            raise self._failure

    def sweep(self, committed: int) -> None:
        """Remove, as far as the store lets it, what no checkpoint needs beside the one of step `committed`. Every save
        does so itself; an attempt that died after the last commit did not. Raises FencedError when a newer attempt is
        there, and nothing else."""
        if self._gang.rank != 0:
            return
        try:
            sweep(self._store, self._attempt, self._retention, committed)
        except FencedError:
            raise
        except HoldfastError as error:
            log.warning("what no checkpoint needs any more is left for the next sweep: %s", error)
        except Exception:
            log.exception("the sweep failed unexpectedly: please report it with this traceback")

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, boxes: Sequence[TensorBox]) -> list[TensorBox]:
        """The state as it is now, in host memory that is used again for every save."""
        pinned = _on_accelerator(boxes)  # elsewhere nothing waits for a copy that goes on behind
        if not self._staging:
            self._staging = [torch.empty(box.data.shape, dtype=box.data.dtype, pin_memory=pinned) for box in boxes]
        for box, copy in zip(boxes, self._staging, strict=True):
            copy.copy_(box.data.detach(), non_blocking=pinned)
        if pinned:
            torch.cuda.current_stream().synchronize()
        return [
            TensorBox(box.name, box.global_shape, box.offset, copy)
            for box, copy in zip(boxes, self._staging, strict=True)
        ]

    def _commit(
        self, step: int, boxes: Sequence[TensorBox], digest: StateDigest | None, scalars: dict[str, float | int]
    ) -> None:
        try:
            reports = self._gang.all_gather(self._write_packs(step, boxes, digest))
            failure = next((report.failure for report in reports if report.failure), None)
            if self._gang.rank == 0 and failure is None:
                failure = self._write_manifest(step, scalars, reports)
            if self._gang.rank == 0 and failure is not None:
                emit(SaveFailed(step=step, reason=str(failure), lag=step - self._committed))
            self._failure = self._gang.broadcast(failure)
            if self._failure is None:
                self._committed = step
        except HoldfastError as error:  # the peers are gone: nothing can be agreed any more
            self._failure = error
        except Exception:  # noqa: BLE001 - carried to the training thread and raised there
            self._failure = _bug(step)

    def _write_packs(self, step: int, boxes: Sequence[TensorBox], digest: StateDigest | None) -> _Report:
        """Make this rank's pieces durable. Whatever fails is reported, because the other ranks wait for a report."""
        try:
            return _Report(self._placed(step, boxes), digest or digest_of(boxes))
        except HoldfastError as error:
            return _Report(failure=error)
        except Exception:  # noqa: BLE001 - carried to every rank and raised there
            return _Report(failure=_bug(step))

    def _placed(self, step: int, boxes: Sequence[TensorBox]) -> list[_Placed]:
        """This rank's pieces with their places: those that no earlier pack holds go into new packs."""
        fresh: list[tuple[TensorBox, str, memoryview]] = []
        places: dict[str, tuple[str, int]] = {}
        cut = [(piece, as_bytes(piece.data)) for box in boxes for piece in box.pieces()]
        digests = [content_digest(data) for _, data in cut]
        for (piece, data), digest in zip(cut, digests, strict=True):
            if digest in places:
                continue
            if digest in self._known:
                places[digest] = self._known[digest]
            else:
                _require_finite(step, piece)
                places[digest] = ("", 0)
                fresh.append((piece, digest, data))
        for group in _groups(fresh):
            contents = content_digest("".join(digest for _, digest, _ in group).encode())
            name = f"{self._attempt.number:06d}-{contents}"
            self._store.put(layout.pack(self._attempt.run_id, name), [data for _, _, data in group])
            start = 0
            for _, digest, data in group:
                places[digest] = (name, start)
                start += len(data)
        placed = []
        for (piece, data), digest in zip(cut, digests, strict=True):
            pack, start = places[digest]
            shape = tuple(piece.data.shape)
            record = Piece(offset=piece.offset, shape=shape, pack=pack, start=start, length=len(data), digest=digest)
            placed.append(_Placed(piece.name, piece.global_shape, piece.dtype_name, record))
        self._known = places
        return placed

    def _write_manifest(
        self, step: int, scalars: dict[str, float | int], reports: Sequence[_Report]
    ) -> HoldfastError | None:
        """Commit, on rank 0. Returns why not."""
        try:
            manifest = Manifest(
                run_id=self._attempt.run_id,
                step=step,
                attempt=self._attempt.number,
                created=time.time(),
                segments=self._segments_now(),
                history=(*self._history, (self._start, self._attempt.number)),
                scalars=scalars,
                state_digest=str(sum((report.digest for report in reports), scalars_digest(scalars))),
                tensors=_records([placed for report in reports for placed in report.placed]),
                **self._describe,
            )
            self._attempt.check(self._store)  # first: a newer attempt may have swept the packs of this one
            self._require_packs(manifest)
            if self.on_commit is not None:
                self.on_commit(step)
            self._attempt.check(self._store)
            self._put_manifest(manifest)
            self._tell(manifest)
            self.sweep(step)
        except HoldfastError as error:
            return error
        except Exception:  # noqa: BLE001 - carried to every rank and raised there
            return _bug(step)
        return None

    def _segments_now(self) -> tuple[Segment, ...]:
        if self._plan is None:
            return self._segments
        return continued(self._segments, self._start, self._attempt.number, self._plan)

    def _tell(self, manifest: Manifest) -> None:
        """Say on rank 0 that a checkpoint is committed, and what it cost."""
        log.info("saved step %d", manifest.step)
        pieces = [piece for record in manifest.tensors.values() for piece in record.pieces]
        fresh = {(piece.pack, piece.start): piece.length for piece in pieces if piece.pack not in self._packs}
        seconds = time.perf_counter() - self._begun
        written = sum(fresh.values())
        emit(SaveCommitted(step=manifest.step, seconds=seconds, stall_seconds=self._stalled, bytes=written))
        self._packs = {piece.pack for piece in pieces}

    def _require_packs(self, manifest: Manifest) -> None:
        """Nothing is committed that could not be loaded. Retryable, since the next attempt writes anew what is gone."""
        sizes = {info.key: info.size for info in self._store.list(layout.run(manifest.run_id, "packs/"))}
        for record in manifest.tensors.values():
            for piece in record.pieces:
                key = layout.pack(manifest.run_id, piece.pack)
                if sizes.get(key, -1) < piece.start + piece.length:
                    found = f"{sizes[key]} bytes" if key in sizes else "gone"
                    raise StoreUnreachableError(
                        f"step {manifest.step}: {key} is {found} in {self._store.url}, and bytes up to "
                        f"{piece.start + piece.length} were written: not committing; something else deletes or "
                        "truncates packs"
                    )

    def _put_manifest(self, manifest: Manifest) -> None:
        """Write the manifest. One that an older attempt wrote for this step while it was being replaced gives way: it
        holds the same bits, but its packs may have been swept before it appeared."""
        key = layout.checkpoint(manifest.run_id, manifest.step)
        if self._store.put_if_absent(key, manifest.to_bytes()):
            return
        stored, version = self._store.get_versioned(key)
        try:
            other = Manifest.from_bytes(stored, key)
        except UnfitError:
            raise
        except DataError as error:
            log.error("%s; this attempt writes it anew", error)
        else:
            if other.attempt > manifest.attempt:
                raise FencedError(f"step {manifest.step} was committed by the newer attempt {other.attempt}")
            same_plan = other.fingerprint == manifest.fingerprint
            if self._same_bits and same_plan and other.state_digest != manifest.state_digest:
                raise DataError(
                    f"{key}: attempt {other.attempt} committed other bits for the same step. The run is not "
                    "deterministic on this hardware; keep both logs and report it"
                )
        try:
            self._store.compare_and_swap(key, manifest.to_bytes(), version)
        except ConflictError as error:
            raise FencedError(
                f"step {manifest.step} was committed by another attempt at this moment ({error})"
            ) from None


def _on_accelerator(boxes: Sequence[TensorBox]) -> bool:
    return any(box.data.is_cuda for box in boxes)


def _bug(step: int) -> HoldfastError:
    """The exception that is being handled, as a failure that other ranks can be told."""
    text = f"step {step}: the save failed unexpectedly: please report it with this traceback\n{traceback.format_exc()}"
    return HoldfastError(text)


def _require_finite(step: int, box: TensorBox) -> None:
    """Raises DivergedError for a state that training could never recover from."""
    if box.data.is_floating_point() and box.data.numel():
        low, high = torch.aminmax(box.data)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise DivergedError(
                f"step {step}: {box.name} is no longer finite (from {low.item()} to {high.item()}); not saved, "
                "the last checkpoint is kept. Lower training.optimizer.learning_rate or set training.clip_norm"
            )


def _groups(pieces: Sequence[tuple[TensorBox, str, memoryview]]) -> list[list[tuple[TensorBox, str, memoryview]]]:
    """Pieces in their order, grouped into packs of about PACK_BYTES."""
    groups: list[list[tuple[TensorBox, str, memoryview]]] = []
    size = PACK_BYTES
    for piece in pieces:
        if size + len(piece[2]) > PACK_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece[2])
    return groups


def _records(placed: Sequence[_Placed]) -> dict[str, TensorRecord]:
    """The tensors of a manifest from the pieces of all ranks."""
    pieces: dict[str, list[_Placed]] = {}
    for each in placed:
        pieces.setdefault(each.name, []).append(each)
    return {
        name: TensorRecord(
            shape=parts[0].shape,
            dtype=parts[0].dtype,
            pieces=tuple(sorted((part.piece for part in parts), key=lambda piece: piece.offset)),
        )
        for name, parts in sorted(pieces.items())
    }
