"""Who sits where in a gang that has spare nodes: `--rdzv-conf=…,spares=N` makes torchrun use it.

torch's rendezvous keeps nodes that come to a full gang in a list of redundant ones, from which all of them leave when
one place is free; those that find none then count as waiting, which starts the gang again and again. Here as many leave
it as there are places, whoever finds none goes back, and a full gang sees nobody waiting. Promises that nobody stands
longer than the gang is there: a spare ends well when the run is trained, and as one that lost the others (202) when
the gang ended otherwise, or the place where the nodes meet is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _Action,
    _RendezvousContext,
    _RendezvousJoinOp,
    _should_keep_alive,
)

log = logging.getLogger("holdfast.launch")

FAREWELL_SECONDS = 15.0  # that a node whose ranks have trained the run waits for the spares to see it


class TrainedError(RendezvousError):
    """No failure: this node has no seat, and those that have one have trained the run."""


class NoSlotError(RendezvousError):
    """The gang that this node stood by for has ended otherwise, or nobody can be asked for a seat any more."""


class _JoinOp(_RendezvousJoinOp):
    """One try of a node to get a seat, for as long as it takes."""

    stood = False  # without a seat, at any time
    trained = False  # the run, by the time at which the gang was closed
    _known = False  # to be without one, in what all nodes see
    _deadline: float | None = None  # monotonic seconds, since this node has last had a free seat before it

    def __init__(self, was_trained: Callable[[], bool]) -> None:
        self._was_trained = was_trained

    def __call__(self, ctx: _RendezvousContext, deadline: float) -> _Action:
        state, most = ctx.state, ctx.settings.max_nodes
        if state.closed:
            if ctx.node not in state.redundancy_list:
                return _Action.ERROR_CLOSED
            self.trained = self.trained or self._was_trained()  # who waits for this node may end next
            state.redundancy_list.discard(ctx.node)  # those who have closed it see that this node has seen it
            return _Action.KEEP_ALIVE
        if ctx.node in state.redundancy_list:
            if not self._known:  # to the others, who from now on wait for it when they have trained the run
                log.warning("all %d seats are taken: this node is a spare, and waits for one", most)
            self._known = True
            free = most - len(state.participants) - len(state.wait_list)
            if sorted(state.redundancy_list).index(ctx.node) >= free:
                return _Action.KEEP_ALIVE if _should_keep_alive(ctx) else _Action.SYNC
            log.warning("a seat is free: this node takes it")
            self._deadline = time.monotonic() + ctx.settings.timeout.join.total_seconds()
            state.redundancy_list.discard(ctx.node)
            self._known = False
            return _Action.ADD_TO_WAIT_LIST if state.complete else _Action.ADD_TO_PARTICIPANTS
        if state.complete and ctx.node not in state.participants and len(state.participants) >= most:
            self.stood = True
            state.wait_list.discard(ctx.node)
            return _Action.ADD_TO_REDUNDANCY_LIST
        return super().__call__(ctx, self._deadline or deadline)


class SpareRendezvousHandler(DynamicRendezvousHandler):
    """The rendezvous of a gang with spare nodes."""

    trained = False  # by the ranks of this node and their like: set before `shutdown`
    _seated = False

    @classmethod
    def install(cls) -> None:
        """Have torchrun use it, in this process."""
        dynamic_rendezvous.DynamicRendezvousHandler = cls  # type: ignore[misc]

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class. Waits for a seat, however long the gang is full. Raises TrainedError when there will be none
        because the run is trained, and NoSlotError when a node without a seat is left alone."""
        op, self._seated = _JoinOp(self._was_trained), False
        dynamic_rendezvous._RendezvousJoinOp = lambda: op  # type: ignore[assignment,misc]
        try:
            found = super().next_rendezvous()
        except RendezvousClosedError as error:
            if op.trained or self._was_trained():
                raise TrainedError("the run is trained") from error
            raise NoSlotError(f"the gang has ended, and this node had no seat: {error}") from error
        except (RendezvousError, DistError) as error:
            if op.trained:
                raise TrainedError("the run is trained") from error
            if op.stood:
                raise NoSlotError(f"no seat can be had any more: {error}") from error
            raise
        self._seated = True
        return found

    def num_nodes_waiting(self) -> int:
        """See base class. None, as long as every seat is taken."""
        waiting = super().num_nodes_waiting()
        return waiting if len(self._state_holder.state.participants) < self._settings.max_nodes else 0

    def shutdown(self) -> bool:
        """See base class. A node without a seat closes nothing: it was told to go. After a training the spares are
        waited for: the node at which all meet may be this one."""
        if not self._seated:
            self._stop_heartbeats()
            return True
        if not self.trained:
            return super().shutdown()
        with suppress(RendezvousError, DistError):
            self._store.set(self._mark(), "1")
        closed = super().shutdown()
        deadline = time.monotonic() + FAREWELL_SECONDS
        with suppress(RendezvousError, DistError):
            while self._state_holder.state.redundancy_list and time.monotonic() < deadline:
                time.sleep(0.2)
                self._state_holder.sync()
        return closed

    def _mark(self) -> str:
        return f"holdfast.trained.{self._settings.run_id}"

    def _was_trained(self) -> bool:
        with suppress(RendezvousError, DistError):
            return bool(self._store.check([self._mark()]))
        return False


def announce_trained(handler: Any) -> None:
    """The ranks of this node have ended well: the spares are told so when it leaves."""
    if isinstance(handler, SpareRendezvousHandler):
        handler.trained = True
