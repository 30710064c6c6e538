"""Loading: every rank fills the boxes it holds from the newest checkpoint that verifies.

Promises that each byte that reaches a tensor had the checksum written in the manifest, and that all ranks load the same
step. What fails its checksum is read again, then by another rank. When two readers agree the checkpoint is set aside
under `checkpoints/damaged/`, said loudly, and the one before it is tried. When nobody agrees, the reader's node is to
blame, and the gang ends to be started again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from holdfast.components.checkpoint.box import DTYPES, TensorBox, overlap
from holdfast.components.checkpoint.doubts import DamageError, Suspect, agreed_reason
from holdfast.components.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, Piece, UnfitError, content_digest
from holdfast.components.checkpoint.retention import checkpoint_steps
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import DataError, MissingError, NoCheckpointVerifiesError
from holdfast.components.spec.plan import Segment
from holdfast.components.store import Store, layout
from holdfast.components.telemetry import emit
from holdfast.components.telemetry.events import CheckpointSetAside

log = logging.getLogger("holdfast.checkpoint")

READ_BYTES = 64 * 2**20  # neighbouring pieces are read together up to this size


def read_manifest(store: Store, run_id: str, step: int) -> Manifest:
    """The manifest of the checkpoint at `step`. Raises MissingError, DataError if it is damaged, UnfitError if a newer
    Holdfast wrote it."""
    key = layout.checkpoint(run_id, step)
    info = store.stat(key)
    if info is None:
        raise MissingError(f"{key}: no such checkpoint in {store.url}")
    if info.size > MAX_MANIFEST_BYTES:
        raise DataError(f"{key}: {info.size} bytes is too large for a manifest")
    manifest = Manifest.from_bytes(store.get(key), key)
    if (manifest.run_id, manifest.step) != (run_id, step):
        raise DataError(f"{key}: is the manifest of run {manifest.run_id} at step {manifest.step}")
    return manifest


def newest_segments(store: Store, run_id: str) -> tuple[Segment, ...]:
    """The segments of a run up to its newest checkpoint whose manifest can be read; none if it has no checkpoint."""
    for step in reversed(checkpoint_steps(store, run_id)):
        try:
            return read_manifest(store, run_id, step).segments
        except (DataError, MissingError) as error:
            log.warning("%s", error)  # whoever loads it sets it aside
    return ()


def load_newest(
    store: Store,
    run_id: str,
    boxes: Sequence[TensorBox],
    gang: Gang,
    attempt: int = 0,
    fence: Callable[[], None] = lambda: None,
) -> Manifest | None:
    """Fill `boxes` from the newest checkpoint that every rank can verify, for attempt number `attempt`. None if the run
    has no checkpoint yet. `fence` raises FencedError once that attempt has been replaced: then nothing is set aside.

    A collective call. Raises NoCheckpointVerifiesError when checkpoints exist and all are damaged, UnfitError when the
    newest intact one cannot be used, BadReaderError when one reader alone says that it is damaged.
    """
    damaged: list[str] = []
    while True:
        steps = gang.from_rank_0(lambda: checkpoint_steps(store, run_id))
        if not steps:
            aside = layout.damaged(run_id)
            if damaged or gang.from_rank_0(partial(_keys, store, aside)):
                raise NoCheckpointVerifiesError(
                    f"run {run_id}: no checkpoint verifies. {'; '.join(damaged)} The damaged ones are under {aside} of "
                    f"{store.url}: delete them to train again from the first step, or start another run with --fresh"
                )
            return None
        step = steps[-1]
        manifest, suspect = _load(store, run_id, step, boxes)
        suspects = {rank: each for rank, each in enumerate(gang.all_gather(suspect)) if each is not None}
        if not suspects and manifest is not None:
            return manifest
        reason = agreed_reason(store, run_id, step, suspects, gang, attempt, partial(_fails, store, run_id, step))
        damaged += [f"step {step}: {reason}"]
        gang.from_rank_0(partial(_set_aside, store, run_id, step, reason, fence))


def _load(store: Store, run_id: str, step: int, boxes: Sequence[TensorBox]) -> tuple[Manifest | None, Suspect | None]:
    """Fill this rank's boxes from a checkpoint, or say what could not be verified."""
    try:
        try:
            manifest = read_manifest(store, run_id, step)
        except UnfitError:
            raise
        except (DataError, MissingError):
            manifest = read_manifest(store, run_id, step)
        fill(store, manifest, boxes)
    except UnfitError:
        raise
    except DamageError as error:
        return None, error.suspect
    except (DataError, MissingError) as error:
        return None, Suspect(str(error), layout.checkpoint(run_id, step))
    return manifest, None


def _fails(store: Store, run_id: str, step: int, suspect: Suspect) -> bool:
    """Whether what another rank could not verify fails here, too."""
    try:
        if not suspect.digest:
            read_manifest(store, run_id, step)
            return False
        data = bytearray(suspect.length)
        store.read_into(suspect.key, suspect.start, memoryview(data))
        return content_digest(memoryview(data)) != suspect.digest
    except UnfitError:
        return False
    except (DataError, MissingError):
        return True


def fill(store: Store, manifest: Manifest, boxes: Sequence[TensorBox]) -> None:
    """Copy what a checkpoint holds into `boxes`, in place. Raises UnfitError for what does not fit, and DataError or
    MissingError for what does not verify."""
    wanted: dict[str, list[tuple[Piece, str, TensorBox]]] = defaultdict(list)
    for box in boxes:
        record = manifest.tensors.get(box.name)
        if record is None or record.shape != box.global_shape or record.dtype != box.dtype_name:
            have = f"{record.dtype} {list(record.shape)}" if record else "nothing"
            raise UnfitError(
                f"{box.name}: the checkpoint at step {manifest.step} holds {have}, "
                f"the model needs {box.dtype_name} {list(box.global_shape)}"
            )
        for piece in record.pieces:
            if box.data.numel() and overlap(piece.offset, piece.shape, box.offset, tuple(box.data.shape)):
                wanted[piece.pack].append((piece, record.dtype, box))
    for pack, uses in wanted.items():
        _fill_from_pack(store, layout.pack(manifest.run_id, pack), uses)


def read_tensor(store: Store, manifest: Manifest, name: str) -> torch.Tensor:
    """One whole tensor of a checkpoint, verified, on the CPU."""
    record = manifest.tensors[name]
    data = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    fill(store, manifest, [TensorBox.whole(name, data)])
    return data


def _fill_from_pack(store: Store, key: str, uses: list[tuple[Piece, str, TensorBox]]) -> None:
    uses = sorted(uses, key=lambda use: use[0].start)
    first = 0
    while first < len(uses):
        start = uses[first][0].start
        end, last = start, first
        while last < len(uses):  # neighbours that follow without a gap
            piece = uses[last][0]
            if piece.start > end or (piece.start + piece.length - start > READ_BYTES and last > first):
                break
            end = max(end, piece.start + piece.length)
            last += 1
        buffer = bytearray(end - start)
        try:
            store.read_into(key, start, memoryview(buffer))
        except (DataError, MissingError) as error:  # too short, or gone
            piece = uses[last - 1][0]
            raise DamageError(Suspect(str(error), key, piece.start, piece.length, piece.digest)) from error
        verified: set[tuple[int, str]] = set()
        for piece, dtype, box in uses[first:last]:
            part = memoryview(buffer)[piece.start - start : piece.start - start + piece.length]
            if (piece.start, piece.digest) not in verified:
                if content_digest(part) != piece.digest:
                    _read_again(store, key, piece, box.name, part)
                verified.add((piece.start, piece.digest))
            _copy(part, piece, dtype, box)
        first = last


def _read_again(store: Store, key: str, piece: Piece, name: str, part: memoryview) -> None:
    """Read a piece that failed its checksum once more. Raises DamageError if it fails again."""
    store.read_into(key, piece.start, part)
    what = f"{key}: the bytes at {piece.start} (+{piece.length}) of {name}"
    if content_digest(part) != piece.digest:
        suspect = Suspect(f"{what} fail their checksum", key, piece.start, piece.length, piece.digest)
        raise DamageError(suspect)
    log.warning("%s failed their checksum, and passed it when they were read again", what)


def _copy(part: memoryview, piece: Piece, dtype: str, box: TensorBox) -> None:
    meeting = overlap(piece.offset, piece.shape, box.offset, tuple(box.data.shape))
    if meeting is None:
        return
    saved = torch.frombuffer(part, dtype=DTYPES[dtype]).view(piece.shape)
    from_piece, into_box = meeting
    with torch.no_grad():
        box.data[into_box].copy_(saved[from_piece])


def _set_aside(store: Store, run_id: str, step: int, reason: str, fence: Callable[[], None]) -> None:
    """Move a checkpoint out of the way of its run. A replaced attempt must not: the newer one may have committed the
    same step again, and well."""
    fence()
    log.error("checkpoint at step %d is DAMAGED and is set aside; falling back to the one before. %s", step, reason)
    key = layout.checkpoint(run_id, step)
    try:
        manifest = store.get(key)
    except MissingError:
        return
    store.put(layout.damaged(run_id, step), manifest)
    fence()
    store.delete(key)
    emit(CheckpointSetAside(step=step, reason=reason))
    for info in list(store.list(layout.doubts(run_id, step))):
        store.delete(info.key)


def _keys(store: Store, folder: str) -> list[str]:
    return [info.key for info in store.list(folder)]
