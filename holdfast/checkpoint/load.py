"""Loading the newest checkpoint that verifies, as a gang.

All ranks load the same step. When one rank cannot verify an object, another rank reads it. If both readers agree, the
checkpoint is quarantined under `checkpoints/damaged/`, an error is logged, and the previous one is tried. If no reader
agrees, the first reader's node is to blame, and the gang ends to be started again.
"""

import logging
from collections.abc import Callable
from functools import partial

from holdfast.checkpoint.catalogue import BoxSource, boxes_for
from holdfast.checkpoint.damage_reports import DamageError, DamageReport, confirmed_reason
from holdfast.checkpoint.index import Index
from holdfast.checkpoint.lineage import counted_steps, newest_step
from holdfast.checkpoint.pieces import piece_fails
from holdfast.checkpoint.reader import Checkpoint, open_checkpoint, read_manifest
from holdfast.checkpoint.root import UnfitError
from holdfast.checkpoint.tree import Node
from holdfast.collectives import Gang
from holdfast.spec.errors import DataError, MissingError, NoCheckpointVerifiesError, StoreUnreachableError
from holdfast.spec.plan import Segment
from holdfast.store import Store, layout
from holdfast.telemetry import emit
from holdfast.telemetry.events import CheckpointQuarantined

log = logging.getLogger("holdfast.checkpoint")


def newest_segments(store: Store, run_id: str) -> tuple[Segment, ...]:
    """The segments of a run up to its newest checkpoint with a readable manifest; empty without one."""
    for step in reversed(counted_steps(store, run_id)):
        try:
            return read_manifest(store, run_id, step).segments
        except (DataError, MissingError) as error:
            log.warning("%s", error)  # a load quarantines it
    return ()


def load_newest(
    store: Store,
    run_id: str,
    boxes: BoxSource,
    gang: Gang,
    attempt: int = 0,
    fence: Callable[[], None] = lambda: None,
) -> Checkpoint | None:
    """Fill `boxes` from the newest checkpoint that every rank can verify, for attempt number `attempt`. None if the run
    has no checkpoint yet. `fence` raises FencedError once that attempt has been replaced: then nothing is quarantined.

    Collective. Raises NoCheckpointVerifiesError when checkpoints exist and all are damaged, UnfitError when the newest
    intact one cannot be used, BadReaderError when only one reader sees damage.
    """
    damaged: list[str] = []
    while True:
        step = gang.from_rank_0(partial(newest_step, store, run_id, attempt or None), int | None)
        if step is None:
            aside = layout.damaged(run_id)
            if damaged or gang.from_rank_0(partial(_keys, store, aside), list[str]):
                raise NoCheckpointVerifiesError(
                    f"run {run_id}: no checkpoint verifies. {'; '.join(damaged)} The damaged ones are under {aside} of "
                    f"{store.url}: delete them to train again from the first step, or start another run with --fresh"
                )
            return None
        checkpoint, suspect = _load(store, run_id, step, boxes)
        reports = gang.all_gather(suspect, DamageReport | None)
        suspects = {rank: report for rank, report in enumerate(reports) if report is not None}
        if not suspects and checkpoint is not None:
            return checkpoint
        reason = confirmed_reason(store, run_id, step, suspects, gang, attempt, partial(_fails, store, run_id, step))
        damaged += [f"step {step}: {reason}"]
        gang.from_rank_0(partial(_set_aside, store, run_id, step, reason, fence))


def load_step(store: Store, run_id: str, step: int, boxes: BoxSource, gang: Gang) -> Checkpoint:
    """Fill `boxes` from the checkpoint of `step` and of no other. Collective. Raises StoreUnreachableError when neither
    it nor a newer one exists: its save has failed, and the next attempt makes it again. Raises
    NoCheckpointVerifiesError when a rank cannot verify it, or it is gone."""
    steps = gang.from_rank_0(lambda: counted_steps(store, run_id), list[int])
    newest = max(steps, default=0)
    if newest < step:
        raise StoreUnreachableError(
            f"run {run_id}: the checkpoint of step {step}, to which training goes back, could not be saved; the next "
            f"attempt resumes from step {newest} and saves it again"
        )
    checkpoint: Checkpoint | None = None
    suspect: DamageReport | None = DamageReport(
        f"step {step} has no checkpoint that counts", layout.checkpoint(run_id, step)
    )
    if step in steps:
        checkpoint, suspect = _load(store, run_id, step, boxes)
    suspects = [report for report in gang.all_gather(suspect, DamageReport | None) if report is not None]
    if suspects or checkpoint is None:
        raise NoCheckpointVerifiesError(
            f"run {run_id}: training goes back to step {step}, and its checkpoint cannot be read: "
            f"{'; '.join(suspect.reason for suspect in suspects)} Delete the checkpoints of this run from step {step} "
            "on: the next attempt computes them again"
        )
    return checkpoint


def _load(store: Store, run_id: str, step: int, boxes: BoxSource) -> tuple[Checkpoint | None, DamageReport | None]:
    """Fill this rank's boxes from a checkpoint, or report what could not be verified."""
    try:
        try:
            checkpoint = open_checkpoint(store, run_id, step)
        except UnfitError:
            raise
        except (DataError, MissingError):
            checkpoint = open_checkpoint(store, run_id, step)
        checkpoint.fill(boxes_for(boxes, checkpoint.tensors))
    except UnfitError:
        raise
    except DamageError as error:
        return None, error.suspect
    except (DataError, MissingError) as error:
        return None, DamageReport(str(error), layout.checkpoint(run_id, step))
    return checkpoint, None


def _fails(store: Store, run_id: str, step: int, suspect: DamageReport) -> bool:
    """Whether an object that another rank could not verify also fails here."""
    try:
        if suspect.index:
            index = Index.from_bytes(store.get(suspect.index), suspect.index)
            return piece_fails(store, read_manifest(store, run_id, step).holder, index, suspect.piece)
        if suspect.digest:
            kind = Node if "/node-" in suspect.key else Index
            kind.from_bytes(store.get(suspect.key), suspect.key, suspect.digest)
            return False
        read_manifest(store, run_id, step)
        return False
    except UnfitError:
        return False
    except (DataError, MissingError):
        return True


def _set_aside(store: Store, run_id: str, step: int, reason: str, fence: Callable[[], None]) -> None:
    """Quarantine a checkpoint. A replaced attempt must not: the newer one may have committed the same step again,
    intact."""
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
    emit(CheckpointQuarantined(step=step, reason=reason))
    for info in list(store.list(layout.doubts(run_id, step))):
        store.delete(info.key)


def _keys(store: Store, folder: str) -> list[str]:
    return [info.key for info in store.list(folder)]
