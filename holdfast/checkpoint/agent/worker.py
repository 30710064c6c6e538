"""The save worker of one writer: makes each copy durable, in order, and commits it where the writer leads. The agent
runs it, or threads of the rank where no agent runs.
"""

import logging
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from holdfast.checkpoint.agent.buffers import boxes_in
from holdfast.checkpoint.agent.protocol import Outcome, Save, SaveRequest
from holdfast.checkpoint.agent.store_writer import TierCopies
from holdfast.checkpoint.box import TensorBox
from holdfast.checkpoint.local_tiers.peers import Server
from holdfast.spec.errors import FencedError, HoldfastError, NoSpaceError, StoreUnreachableError

log = logging.getLogger("holdfast.checkpoint")

TELL_SECONDS = 5.0  # interval between two tries to report a failure to other writers


class Work(Protocol):
    """One writer's part in checkpoints. An exception fails only the save that raised it."""

    @property
    def leads(self) -> bool:
        """Whether this writer combines the parts of others: rank 0, and the first rank of each group of a large
        gang."""

    def write(self, request: SaveRequest, boxes: Sequence[TensorBox]) -> None:
        """Make this writer's part durable."""

    def commit(self, request: SaveRequest) -> int | None:
        """Wait for the parts of other writers and combine them. Return the bytes written for a commit."""

    def give_up(self, step: int, failure: HoldfastError) -> None:
        """Tell the writers that wait for this writer's part that it will not come."""

    def after_commit(self, step: int) -> None:
        """Collect garbage: not part of the commit, so it may take its time."""

    def lift(self) -> None:
        """Remove the limit on uploads, because a caller waits."""

    def hurry(self) -> None:
        """Shorten the wait for others' parts. No rank runs any more, so a part comes soon or never."""


@dataclass
class _Copy:
    request: SaveRequest
    boxes: Sequence[TensorBox] | None  # None: it is durable already
    abandoned: str = ""  # why there is no copy, and will be none

    @property
    def step(self) -> int:
        return self.request.step


class SaveWorker:
    """Does the work of one writer, in threads that end with `close` or with the process."""

    def __init__(self, work: Work, tell: Callable[[Outcome], None], name: str, near: TierCopies | None = None) -> None:
        """`tell` is called from those threads. `near` keeps copies in local tiers, before and independently of the
        store writes, so that no such copy waits for the store."""
        self._work, self._tell, self._name, self._near, self.closed = work, tell, name, near, False
        self._changed = threading.Condition()
        self._open: dict[int, str] = {}  # by step: the work in progress
        self._untold: dict[int, HoldfastError] = {}  # failures that waiting writers do not know yet
        self._untidy = 0  # commits whose collection has not run yet
        self._writes: SimpleQueue[_Copy | None] = SimpleQueue()
        self._keeps: SimpleQueue[_Copy | None] = SimpleQueue() if near is not None else self._writes
        self._commits: SimpleQueue[_Copy | None] = SimpleQueue()
        self._done: SimpleQueue[int | None] = SimpleQueue()
        acts = [*([self._keep_all] if near is not None else []), self._write_all]
        for act in [*acts, self._commit_all, self._tidy_all] if work.leads else acts:
            threading.Thread(target=act, name=f"checkpoint {name}", daemon=True).start()

    def save(self, request: SaveRequest, boxes: Sequence[TensorBox] | None) -> None:
        """Take over a copy. Its memory must not change until an outcome is reported. `boxes` None: it is durable
        already."""
        if request.committed or self._near is not None:
            self._begin(_Copy(request, boxes))
        else:  # no tier is available on this node
            self._tell(Outcome(step=request.step, what="done"))

    def give_up(self, step: int, why: str) -> None:
        """Record that no copy of that step exists, and none will come."""
        self._begin(_Copy(SaveRequest(step=step), None, abandoned=why))

    def busy(self) -> list[str]:
        """Descriptions of the unfinished work."""
        with self._changed:
            return [f"step {step} of {self._name}: {description}" for step, description in self._open.items()]

    def lift(self) -> None:
        """Remove the limit on uploads."""
        self._work.lift()

    def hurry(self) -> None:
        """Shorten the wait for the parts of others."""
        self._work.hurry()

    def close(self) -> None:
        """Accept no more work. The threads end after the work that was accepted."""
        self.closed = True
        self._keeps.put(None)

    def _begin(self, copy: _Copy) -> None:
        with self._changed:
            self._open[copy.step] = "its part is being written"
        self._keeps.put(copy)

    def _keep_all(self) -> None:
        assert self._near is not None
        while (copy := self._keeps.get()) is not None:
            if copy.boxes is not None and copy.request.tiers:
                try:
                    copy.request = copy.request.with_digest(self._near.keep(copy.request, copy.boxes))
                except BaseException:  # no save depends on it
                    log.exception("step %d is not kept near: please report it with this traceback", copy.step)
            if copy.request.committed:
                self._writes.put(copy)  # abandoned copies too: in order
            else:
                copy.boxes = None
                self._end(copy.step)
        self._writes.put(None)

    def _write_all(self) -> None:
        while True:
            try:
                copy = self._writes.get(timeout=TELL_SECONDS if self._untold else None)
            except Empty:
                self._tell_others()
                continue
            if copy is None:
                break
            self._write(copy)
        self._commits.put(None)

    def _write(self, copy: _Copy) -> None:
        step = copy.step
        try:
            if copy.abandoned:
                raise StoreUnreachableError(copy.abandoned)
            if copy.boxes is not None:
                self._work.write(copy.request, copy.boxes)
        except BaseException as error:  # noqa: BLE001 - passed to the caller that waits, and raised there
            failure = as_failure(step, error)
            with self._changed:
                self._untold[step] = failure
            self._end(step, failure)
            self._tell_others()
            return
        finally:
            copy.boxes = None  # its memory is no longer needed
        if not self._work.leads:
            self._end(step)
            return
        with self._changed:
            self._open[step] = "it waits for the parts of other ranks"
        self._tell(Outcome(step=step, what="durable"))
        self._commits.put(copy)

    def _commit_all(self) -> None:
        while (copy := self._commits.get()) is not None:
            try:
                size = self._work.commit(copy.request)
            except BaseException as error:  # noqa: BLE001 - passed to the caller that waits, and raised there
                self._end(copy.step, as_failure(copy.step, error))
                continue
            with self._changed:
                self._untidy += 1
            self._end(copy.step, written=size)
            self._done.put(copy.step)
        self._done.put(None)

    def _tidy_all(self) -> None:
        while (step := self._done.get()) is not None:
            try:
                self._work.after_commit(step)
            except FencedError as error:  # the commit stands, and is the last one
                self._tell(_failed(step, error))
            except HoldfastError as error:
                log.warning("what no checkpoint needs any more is left for the next sweep: %s", error)
            except BaseException:  # a waiter must not wait forever
                log.exception("the collection failed unexpectedly: please report it with this traceback")
            with self._changed:
                self._untidy -= 1
                self._changed.notify_all()

    def _tell_others(self) -> None:
        """Tell waiting writers that a part will not come. If the store is unreachable for this too, try again later."""
        for step, failure in sorted(self._untold.items()):
            try:
                self._work.give_up(step, failure)
            except (StoreUnreachableError, NoSpaceError):
                return
            except BaseException as error:  # noqa: BLE001 - they wait for as long as they do for a part
                log.warning("step %d: that %s failed could not be reported to other ranks: %s", step, self._name, error)
            with self._changed:
                del self._untold[step]
                self._changed.notify_all()

    def _end(self, step: int, failure: HoldfastError | None = None, written: int | None = None) -> None:
        outcome = Outcome(step=step, what="done", bytes=written) if failure is None else _failed(step, failure)
        self._tell(outcome)
        with self._changed:
            self._open.pop(step, None)
            self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Wait until no work is left, collection included, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._open or self._untidy), seconds)

    def finish(self, seconds: float) -> None:
        """Wait until no work and no failure report is left, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._open or self._untidy or self._untold), seconds)


def _failed(step: int, failure: HoldfastError) -> Outcome:
    return Outcome(step=step, what="failed", error=type(failure).__name__, reason=str(failure))


def as_failure(step: int, error: BaseException) -> HoldfastError:
    """The failure of a save in a form that can be sent to another process."""
    if isinstance(error, HoldfastError):
        return error
    text = "".join(traceback.format_exception(error))
    return HoldfastError(f"step {step}: the save failed unexpectedly: please report it with this traceback\n{text}")


# The work of the agent in threads of the rank, where no agent runs: a single process, a library, a test.

CLOSE_SECONDS = 60.0  # limit for the saves in flight
SETTLE_SECONDS = 600.0  # limit for collection


class LocalSaver:
    """Takes saves as `AgentClient` does."""

    def __init__(self, work: Work, tell: Callable[[Outcome], None], near: TierCopies | None = None) -> None:
        self._saving = SaveWorker(work, tell, "this rank", near)
        self._near = near
        self._server: Server | None = None
        self._memory: dict[int, torch.Tensor] = {}

    def allocate(self, buffer: int, size: int) -> torch.Tensor:
        """See AgentClient."""
        self._memory[buffer] = torch.empty(size, dtype=torch.uint8)
        return self._memory[buffer]

    def save(self, save: Save) -> None:
        """See AgentClient."""
        assert save.buffer is not None, "nothing is saved twice without an agent"
        boxes = boxes_in(self._memory[save.buffer], save.slots)
        self._saving.save(save.request, boxes)

    def listen(self, listener: socket.socket, token: str) -> None:
        """See AgentClient."""
        if self._near is not None:
            self._server = Server(listener, token, self._near.run_id, self._near.tiers)

    def lost(self, step: int, reason: str) -> None:
        """See AgentClient."""
        self._saving.give_up(step, reason)

    def lift(self) -> None:
        """See AgentClient."""
        self._saving.lift()

    def settle(self) -> None:
        """Wait for the collection that follows a commit."""
        self._saving.settle(SETTLE_SECONDS)

    def close(self) -> None:
        """See AgentClient. Waits, since no other process finishes the work."""
        self._saving.hurry()
        self._saving.finish(CLOSE_SECONDS)
        self._saving.close()
        if self._server is not None:
            self._server.close(listener=True)
