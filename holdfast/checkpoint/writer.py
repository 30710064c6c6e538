"""The rank's side of saving: hand over the state and continue training. The rest happens in the background.

`save` returns immediately. The state must not change before `wait_for_staging`. The agent of this node (`agent`), which
outlives the rank, makes complete copies durable and commits them. Without an agent, threads do this. After a transient
store error, the next save tries again, within a stated lag. Only rank 0 knows what is committed. Other ranks know that
their own part is durable, and learn of an end as they learn of any other rank's end.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from holdfast.checkpoint.agent.buffers import Copy, Staging, free_buffers, laid_out
from holdfast.checkpoint.agent.client import AgentClient
from holdfast.checkpoint.agent.protocol import ROOM, VARIABLE, Outcome, Save, SaveRequest, Writer, require_small
from holdfast.checkpoint.agent.store_writer import StoreWriter, TierCopies
from holdfast.checkpoint.agent.worker import LocalSaver, as_failure
from holdfast.checkpoint.attempts import Attempt
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.catalogue import BoxSource, boxes_for
from holdfast.checkpoint.gc import Collector
from holdfast.checkpoint.load import load_newest, load_step
from holdfast.checkpoint.local_tiers.tier_set import TierSet
from holdfast.checkpoint.local_tiers.tier_writer import Record
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import Checkpoint
from holdfast.checkpoint.retention import Retention
from holdfast.collectives import Gang
from holdfast.spec.errors import (
    FencedError,
    HoldfastError,
    HungError,
    NoSpaceError,
    StoreUnreachableError,
    error_named,
)
from holdfast.spec.plan import Plan
from holdfast.store import Store
from holdfast.telemetry import emit
from holdfast.telemetry.events import SaveCommitted, SaveFailed

log = logging.getLogger("holdfast.checkpoint")

HAND_OVER_SECONDS = 120.0  # limit for handing the last finished copy to the saver, when closing
NEAR_SECONDS = 10.0  # limit of the wait of training for a buffer, for a copy that only local tiers keep
STORE_FAULTS = (StoreUnreachableError, NoSpaceError)  # errors that may be gone by the next save


@dataclass
class _PendingSave:
    """A save without a final outcome."""

    buffer: int | None  # the buffer with its copy; None: the copy is not needed any more
    begun: float  # seconds of time.perf_counter
    stalled: float = 0.0  # seconds that training waited for it
    committed: bool = True  # whether it becomes a checkpoint, or only local tiers keep it


@dataclass(frozen=True)
class SaveOptions:
    """How checkpoints are saved."""

    max_lag_steps: int = 0  # while the store takes no checkpoint, saves continue so far beyond the newest one
    same_bits: bool = True  # whether another attempt that committed a step must have committed the same bits
    compress: bool = False  # lossless, where it saves space
    upload_rate: float | None = None  # bytes a second at most, unless a caller waits for the save


class Checkpointer:
    """Saves the boxes of a gang. `restore`, `load` and `drop_local_tiers` are collective; nothing else talks to other
    ranks."""

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        retention: Retention,
        *,
        describe: dict[str, Any],
        plan: Plan | None = None,
        options: SaveOptions = SaveOptions(),
        gang: Gang | None = None,
        near: TierSet | None = None,
    ) -> None:
        """`describe` holds the manifest fields that do not change (dataset_id, layout...). `plan` is the plan of this
        gang. It becomes a new segment of the run unless the loaded checkpoint has the same plan. `gang`: the ranks that
        save (default: a new one). `near`: the local tiers. Set `on_commit` to a function of the step: rank 0 calls it
        from another thread when the step is committed."""
        self._store, self._attempt, self._retention = store, attempt, retention
        self._describe, self._plan, self._options, self._near = describe, plan, options, near
        self.on_commit: Callable[[int], None] = lambda _: None
        self._gang = gang or Gang()
        self._loaded: Manifest | None = None
        self.near_start: Record | None = None  # record of the loaded local-tier step, which is not a checkpoint yet
        self._waits_near = True  # whether a copy that only local tiers keep may wait for a buffer
        self._saver: AgentClient | LocalSaver | None = None
        self._staging = Staging(lambda buffer, size: self._open_saver().allocate(buffer, size))
        self._copies: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._copy: Copy | None = None  # the newest one
        self._step = 0  # saved last
        self._changed = threading.Condition()  # guards the fields below
        self._free = free_buffers()
        self._pending: dict[int, _PendingSave] = {}  # by step
        self._failures: dict[int, HoldfastError] = {}  # store errors that were not reported yet, by step
        self._fatal: HoldfastError | None = None  # any other failure: nothing is saved any more
        self._committed = 0  # the newest step that is safe; only rank 0 knows it
        self.failed_saves = 0  # refused by the store while training continued
        self.stall_seconds = 0.0  # time that training waited for saves, in this process

    def restore(
        self,
        boxes: BoxSource,
        first_state: Callable[[Sequence[TensorBox]], None],
        accept: Callable[[Manifest], None] = lambda _: None,
    ) -> int:
        """Fill `boxes` from the newest verified local-tier step or checkpoint, or with `first_state` if neither exists.
        Return the step of the state. A function `boxes` is called for each step that is tried, with its catalogue. If
        the state came from a local tier, `near_start` is set and the caller must save it to the store. Raises what
        `load_newest` raises, and what `accept` raises for the checkpoint found. Raises SpecError for more boxes than a
        message to the agent can hold."""
        if os.environ.get(VARIABLE):
            require_small(Save(request=SaveRequest(step=0), buffer=0, slots=laid_out(boxes_for(boxes, None))[0]), ROOM)
        attempt, fence = self._attempt, partial(self._attempt.check, self._store)
        near = self._near.load(boxes, self._plan.fingerprint if self._plan else "") if self._near else None
        checkpoint: Checkpoint | None
        if near is not None:
            checkpoint, self.near_start = near.checkpoint, near.record
        else:
            checkpoint = load_newest(self._store, attempt.run_id, boxes, self._gang, attempt.number, fence)
        if checkpoint is None:
            first_state(boxes_for(boxes, None))
        else:
            accept(checkpoint.manifest)
            self.adopt(checkpoint)
        start = 0 if checkpoint is None else checkpoint.step
        if self._near is not None:
            self._near.begin(start, near)
            self._committed = self._near.root if near is not None else start
        self._open_saver()  # from now on it knows this rank
        return start

    @property
    def scalars(self) -> Mapping[str, float | int]:
        """The scalars of the restored state; empty for a first state."""
        if self.near_start is not None:
            return self.near_start.scalars
        return {} if self._loaded is None else self._loaded.scalars

    def load(self, step: int, boxes: BoxSource) -> Mapping[str, float | int]:
        """Fill `boxes` from this run's checkpoint of `step`, saved by this or an earlier attempt, and return its
        scalars. Collective; waits for the saves in flight. Raises StoreUnreachableError while that save has not
        succeeded, NoCheckpointVerifiesError when it is damaged or gone."""
        self.wait()  # on rank 0: for the commit
        self._gang.barrier()
        return load_step(self._store, self._attempt.run_id, step, boxes, self._gang).manifest.scalars

    def adopt(self, found: Checkpoint) -> None:
        """Continue from a checkpoint that was just loaded and verified: later saves reference its pieces."""
        self._loaded, self._committed = found.manifest, found.step

    def save(
        self,
        step: int,
        boxes: Sequence[TensorBox],
        scalars: Mapping[str, float | int],
        attachments: Mapping[str, str] | None = None,
        *,
        committed: bool = True,
    ) -> None:
        """Save `boxes`, which together with the boxes of the other ranks make up every tensor exactly once. They must
        not change until `wait_for_staging`. `attachments` are rank 0's objects, written just before the commit. Local
        tiers keep the step if it is due there. If the step is not `committed` as well, only permanent failures are
        raised.

        Waits for a buffer only while the two previous saves are still being written. On rank 0, also waits for a commit
        that is more than `max_lag_steps` behind. Raises the failure of an earlier save, unless it is a store error and
        this step is within `max_lag_steps` of the newest checkpoint.
        """
        begun = time.perf_counter()
        self.wait_for_staging()
        saver = self._open_saver()
        with self._changed:
            if not (self._has_room(step) if committed else self._has_room_near(step)):
                self.stall_seconds += time.perf_counter() - begun
                return
            buffer = min(self._free)
            self._free.remove(buffer)
            self._pending[step] = flight = _PendingSave(buffer, begun, committed=committed)
        self._copy, self._step = Copy(boxes), step
        near = self._near.due(step) if self._near is not None else ()
        request = SaveRequest(
            step=step, scalars=dict(scalars), attachments=dict(attachments or {}), tiers=near, committed=committed
        )
        self._copies.put(partial(self._hand_over, saver, self._copy, list(boxes), Save(request=request, buffer=buffer)))
        flight.stalled = time.perf_counter() - begun
        self.stall_seconds += flight.stalled

    def near_due(self, step: int) -> bool:
        """Whether a local tier keeps the state after `step`."""
        return self._near is not None and bool(self._near.due(step))

    def wait_for_staging(self) -> None:
        """Wait until the state that was saved last may change. Call it before each optimizer step; mostly it returns
        immediately. Raises HungError when the copy takes longer than COPY_SECONDS."""
        if self._copy is None:
            return
        begun, copy = time.perf_counter(), self._copy
        self._copy = None
        try:
            copy.wait()
        except HungError as error:
            failure = HungError(f"step {self._step}: {error}")
            with self._changed:
                self._fatal = self._fatal or failure
            raise failure from None
        waited = time.perf_counter() - begun
        self.stall_seconds += waited
        with self._changed:
            if (flight := self._pending.get(self._step)) is not None:
                flight.stalled += waited

    def wait(self) -> None:
        """Wait for the saves in flight: on rank 0 for their commits, on other ranks until their part is durable. Raises
        the failure of the newest save, or any permanent failure."""
        self.wait_for_staging()
        if self._saver is not None:
            self._saver.lift()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
        if self._saver is not None:
            self._saver.settle()
        with self._changed:
            failure = self._fatal or self._failures.get(self._step)
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close. The agent, or this process within a time limit, still commits the saves that were handed over. Raises
        nothing."""
        try:
            self.wait_for_staging()
        except HungError as error:
            log.error("%s; it is left behind", error)
        handed = threading.Event()
        self._copies.put(handed.set)
        self._copies.put(None)
        if self._saver is not None:
            if not handed.wait(HAND_OVER_SECONDS):
                steps = ", ".join(map(str, sorted(self._pending))) or "none"
                log.error(
                    "a copy was not handed over to who makes it durable in %g s (steps without an outcome: %s); it is "
                    "left behind",
                    HAND_OVER_SECONDS,
                    steps,
                )
            self._saver.close()

    def drop_local_tiers(self) -> None:
        """Delete the copies in local tiers once the last step is committed. Collective where local tiers exist; call it
        after `wait`."""
        if self._near is not None:
            self._near.clear()

    def collect_garbage(self, committed: int) -> None:
        """Remove, as far as the store allows, what no checkpoint needs, given the commit of step `committed`. Each
        commit already does this. The call is for an attempt that died after its last commit. Raises FencedError when a
        newer attempt exists, and nothing else."""
        if self._gang.rank != 0:
            return
        try:
            Collector(self._store, self._attempt, self._retention).collect(committed)
        except FencedError:
            raise
        except HoldfastError as error:
            log.warning("what no checkpoint needs any more is left for the next collection: %s", error)
        except Exception:
            log.exception("the collection of garbage failed unexpectedly: please report it with this traceback")

    def _open_saver(self) -> AgentClient | LocalSaver:
        """The saver that makes saves durable: the agent of this node, or threads where no agent runs."""
        if self._saver is None:
            loaded, attempt = self._loaded, self._attempt
            writer = Writer(
                store=self._store.url,
                run_id=attempt.run_id,
                attempt=attempt.number,
                launch=attempt.launch,
                rank=self._gang.rank,
                world=self._gang.size,
                local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                describe=self._describe,
                plan=self._plan,
                segments=loaded.segments if loaded else (),
                history=loaded.history if loaded else (),
                start=loaded.step if loaded else 0,
                root=self._near.root if self._near is not None and self.near_start is not None else None,
                same_bits=self._options.same_bits,
                retention=self._retention,
                compress=self._options.compress,
                upload_rate=self._options.upload_rate,
                near=self._near.tiers if self._near is not None else (),
                neighbour=self._near.neighbour if self._near is not None else None,
            )
            if path := os.environ.get(VARIABLE):
                self._saver = AgentClient(path, writer, self._ended)
            else:
                self._saver = LocalSaver(StoreWriter(writer, self._store), self._ended, TierCopies.of(writer))
            if self._near is not None and (listener := self._near.listener()) is not None:
                self._saver.listen(*listener)
            threading.Thread(target=self._copy_all, name="checkpoint copy", daemon=True).start()
        return self._saver

    def _copy_all(self) -> None:
        while (copy := self._copies.get()) is not None:
            copy()

    def _hand_over(self, saver: AgentClient | LocalSaver, copy: Copy, boxes: list[TensorBox], save: Save) -> None:
        """Copy the state and hand the copy to the saver. Runs in a thread."""
        assert save.buffer is not None
        try:
            slots = self._staging.fill(save.buffer, copy, boxes)
            save = Save(request=save.request.with_digest(copy.digest), buffer=save.buffer, slots=slots)
            if isinstance(saver, AgentClient):
                require_small(save)
        except BaseException as error:  # noqa: BLE001 - raised in the training thread
            copy.end()
            failure = as_failure(save.step, error)
            self._failed(save.step, failure)  # first: the reply to `lost` arrives as a store error
            if save.request.committed:
                saver.lost(save.step, str(failure))
            return
        saver.save(save)

    def _ended(self, outcome: Outcome) -> None:
        """Handle the outcome of a save. Runs in a thread."""
        step = outcome.step
        if outcome.what == "failed":
            self._failed(step, error_named(outcome.error, outcome.reason))
            return
        with self._changed:
            flight = self._pending.get(step)
            if flight is None:
                return
            committed = outcome.what == "done" and self._gang.rank == 0 and flight.committed
            self._release(flight)
            if outcome.what == "done":
                del self._pending[step]
            if committed:  # reported before any waiter resumes, and perhaps exits
                self._committed = max(self._committed, step)
                self.on_commit(step)
                seconds = time.perf_counter() - flight.begun
                emit(SaveCommitted(step=step, seconds=seconds, stall_seconds=flight.stalled, bytes=outcome.bytes))
            self._changed.notify_all()

    def _failed(self, step: int, failure: HoldfastError) -> None:
        with self._changed:
            flight = self._pending.pop(step, None)
            if flight is None:
                if isinstance(failure, FencedError):
                    self._fatal = self._fatal or failure
                return
            if not isinstance(failure, HungError):  # which may wake up, and read the buffer
                self._release(flight)
            if isinstance(failure, STORE_FAULTS) and not flight.committed:
                log.warning("step %d is not kept near the ranks: %s", step, failure)
            elif isinstance(failure, STORE_FAULTS):
                self._failures[step] = failure
            else:
                self._fatal = self._fatal or failure
            if self._gang.rank == 0 and flight.committed:
                emit(SaveFailed(step=step, reason=str(failure), lag=step - self._committed))
            self._changed.notify_all()

    def _release(self, flight: _PendingSave) -> None:
        """Free the buffer of a save. The caller holds `_changed`."""
        if flight.buffer is not None:
            self._free.add(flight.buffer)
            flight.buffer = None

    def _has_room(self, step: int) -> bool:
        """Wait for a buffer, and until `step` is not too far ahead. The caller holds `_changed`."""
        while True:
            self._raise_or_retry(step)
            if self._free and not self._lags(step):
                return True
            self._changed.wait()

    def _has_room_near(self, step: int) -> bool:
        """Wait briefly for a buffer. After a timeout, do not wait again until a buffer is free in time. The caller
        holds `_changed`."""
        seconds = NEAR_SECONDS if self._waits_near else 0.0
        self._changed.wait_for(lambda: self._free or self._fatal, seconds)
        if self._fatal is not None:
            raise self._fatal
        if not self._free and self._waits_near:
            log.warning("step %d and those after it are not kept near: no buffer was free for %g s", step, seconds)
        self._waits_near = bool(self._free)
        return self._waits_near

    def _lags(self, step: int) -> bool:
        """Whether a save is pending and `step` is too far ahead of the newest commit."""
        return self._gang.rank == 0 and bool(self._pending) and step - self._committed > self._options.max_lag_steps

    def _raise_or_retry(self, step: int) -> None:
        """Raise the failures of earlier saves, unless this step may retry them. The caller holds `_changed`."""
        if self._fatal is not None:
            raise self._fatal
        for failed, failure in sorted(self._failures.items()):
            if self._gang.rank == 0 and step - self._committed > self._options.max_lag_steps:
                raise failure
            del self._failures[failed]
            if self._gang.rank != 0:
                continue  # rank 0 knows what is committed, and decides
            self.failed_saves += 1
            log.warning(
                "step %d was not saved, and step %d is tried now; the newest checkpoint is that of step %d: %s",
                failed,
                step,
                self._committed,
                failure,
            )
