"""Elastic rendezvous with spare nodes: `--rdzv-conf=…,spares=N` makes torchrun use it.

torch keeps surplus nodes in a redundancy list. When one slot frees up, *all* of them leave the list, and the losers
count as waiting nodes, which restarts the gang repeatedly. Here, only as many leave as there are free slots, a node
without a slot goes back, and a full gang sees no waiting nodes.

No spare outlives the gang. A spare succeeds when the run is trained. It ends as a node that lost its peers (202) when
the gang ended otherwise, or when the rendezvous store is gone.
"""

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

FAREWELL_SECONDS = 15.0  # that a node waits, once the run is trained, until the spares have noticed


class TrainedError(RendezvousError):
    """Not a failure: this node has no slot, and the nodes with a slot have trained the run."""


class NoSlotError(RendezvousError):
    """The gang that this spare waited for has ended otherwise, or its rendezvous is gone."""


class _JoinOp(_RendezvousJoinOp):
    """One attempt of a node to get a slot, without a time limit."""

    stood = False  # whether it was without a slot at any time
    trained = False  # whether the run was trained when the gang closed
    _known = False  # whether the shared state shows that it has no slot
    _deadline: float | None = None  # monotonic seconds, from when this node last saw a free slot

    def __init__(self, was_trained: Callable[[], bool]) -> None:
        self._was_trained = was_trained

    def __call__(self, ctx: _RendezvousContext, deadline: float) -> _Action:
        state, most = ctx.state, ctx.settings.max_nodes
        if state.closed:
            self.trained = self.trained or self._was_trained()  # the node that hosts the store may end next
            if ctx.node not in state.redundancy_list | state.wait_list:
                return _Action.ERROR_CLOSED
            state.redundancy_list.discard(ctx.node)  # the nodes that closed it see that this node has noticed
            state.wait_list.discard(ctx.node)
            return _Action.KEEP_ALIVE
        if ctx.node in state.redundancy_list:
            if not self._known:  # From now on, the nodes that have trained the run wait for this node.
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

    trained = False  # whether this or another node's ranks have trained the run: set before `shutdown`
    _seated = False

    @classmethod
    def install(cls) -> None:
        """Have torchrun use it in this process."""
        dynamic_rendezvous.DynamicRendezvousHandler = cls  # type: ignore[misc]

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class. Waits for a slot as long as the gang is full. Raises TrainedError if the run is trained, and
        NoSlotError if this node had no slot and the gang or its store is gone."""
        op, self._seated = _JoinOp(self._was_trained), False
        dynamic_rendezvous._RendezvousJoinOp = lambda: op  # type: ignore[assignment,misc]
        try:
            info = super().next_rendezvous()
        except (RendezvousError, DistError) as error:
            closed = isinstance(error, RendezvousClosedError)
            self.trained = op.trained or (closed and self._was_trained())
            if self.trained:
                raise TrainedError("the run is trained") from error
            if closed:
                raise NoSlotError(f"the gang has ended, and this node had no seat: {error}") from error
            if op.stood:
                raise NoSlotError(f"no seat can be had any more: {error}") from error
            raise
        self._seated = True
        return info

    def num_nodes_waiting(self) -> int:
        """See base class. Zero while every slot is taken."""
        waiting = super().num_nodes_waiting()
        return waiting if len(self._state_holder.state.participants) < self._settings.max_nodes else 0

    def shutdown(self) -> bool:
        """See base class. A node without a slot closes nothing: it had to stop. After training, each node waits for the
        spares: it may host the rendezvous store, also without a slot, if it lost the one that it had."""
        closed = True
        if not self._seated:
            self._stop_heartbeats()
        elif not self.trained:
            return super().shutdown()
        else:
            with suppress(RendezvousError, DistError):
                self._store.set(self._mark(), "1")
            closed = super().shutdown()
        if self.trained:
            self._wait_for_spares()
        return closed

    def _wait_for_spares(self) -> None:
        deadline = time.monotonic() + FAREWELL_SECONDS
        with suppress(RendezvousError, DistError):
            while self._unseated() and time.monotonic() < deadline:
                time.sleep(0.2)
                self._state_holder.sync()

    def _unseated(self) -> bool:
        """Whether spares, or nodes that took a free seat too late, have not noticed the end."""
        state = self._state_holder.state
        return bool(state.redundancy_list or state.wait_list)

    def _mark(self) -> str:
        return f"holdfast.trained.{self._settings.run_id}"

    def _was_trained(self) -> bool:
        with suppress(RendezvousError, DistError):
            return bool(self._store.check([self._mark()]))
        return False


def announce_trained(handler: Any) -> None:
    """Record that the ranks of this node have succeeded. The spares learn it when this node leaves."""
    if isinstance(handler, SpareRendezvousHandler):
        handler.trained = True
