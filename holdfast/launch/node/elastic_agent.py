"""Elastic agent of a node, which torchrun uses for `--nnodes=MIN:MAX` and for spare nodes.

torch's own agent restarts its ranks after any failure, or after none, and a node that fails ends the gang. Here, a node
whose ranks only lost their peers meets the remaining nodes again and continues. The node that is the cause ends and
leaves the gang to them. A new node is admitted once the ranks have saved and left.
"""

import logging
import os
import signal
import time

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.rendezvous import RendezvousStateError

from holdfast.launch.exits import as_exit_code
from holdfast.launch.node.fast_exit_agent import FastExitAgent
from holdfast.launch.node.spare_rendezvous import announce_trained
from holdfast.spec.errors import ExitCode

log = logging.getLogger("holdfast.launch")

_SAVED_AND_LEFT = {ExitCode.PREEMPTED, ExitCode.TERMINATED}
_AFTER_ANOTHER = {ExitCode.LOST_PEER, *_SAVED_AND_LEFT}


class ElasticNodeAgent(FastExitAgent):
    """Agent of a gang that shrinks and grows; see the module. `max_restarts` is how often this node may lose its peers
    and continue. Growth does not count."""

    _incomplete_since: float | None = None  # monotonic seconds: when a member was first missed

    @classmethod
    def install(cls) -> None:
        """Have torchrun use this agent, which survives the loss of a rank. Rank 0 of each new gang hosts the ranks'
        store. By default, the first node's agent hosts it, and that node may be the one that is lost."""
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        super().install()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._shutdown(timeout=self._shutdown_timeout)  # they save

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self._incomplete_since = None
        super()._initialize_workers(worker_group)
        log.info("%d nodes train together, this is number %d", worker_group.group_world_size, worker_group.group_rank)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED:
            announce_trained(worker_group.spec.rdzv_handler)
        elif result.state == WorkerState.FAILED:
            self._judge({as_exit_code(failure.exitcode) for failure in result.failures.values()}, worker_group)
        elif result.state == WorkerState.HEALTHY and self._has_lost_one(worker_group):
            log.warning("a node says nothing any more, and the ranks wait for it: they are ended")
            if self._remaining_restarts == 0:
                raise RendezvousStateError("a node says nothing any more, and no restart is left")
            self._remaining_restarts -= 1
            self._shutdown(signal.SIGKILL)
            self._restart_workers(worker_group)
        return result

    def _judge(self, codes: set[int], worker_group: WorkerGroup) -> None:
        """Decide by the ranks' exit codes whether they restart: torch restarts them while restarts remain."""
        if codes <= _SAVED_AND_LEFT:  # another node's agent saw the new node first, or had to stop
            self._remaining_restarts += 1
        elif not codes <= _AFTER_ANOTHER:
            self._remaining_restarts = 0
            if all(code >= 128 for code in codes):  # another node may succeed: do not close the rendezvous
                worker_group.spec.rdzv_handler.shutdown = lambda: True  # type: ignore[method-assign]
        elif self._remaining_restarts > 0:
            log.warning("another node was lost: the ones that are left meet again")

    def _has_lost_one(self, worker_group: WorkerGroup) -> bool:
        """Whether a member of the gang has been gone for long while the ranks wait for it. A node without power or
        network closes no connection. A member that left in order is also gone before the ranks here have saved."""
        members = worker_group.spec.rdzv_handler._state_holder.state.participants  # type: ignore[attr-defined]
        if len(members) >= (worker_group.group_world_size or 0):
            self._incomplete_since = None
            return False
        now = time.monotonic()
        self._incomplete_since = self._incomplete_since or now
        return now - self._incomplete_since > self._shutdown_timeout
