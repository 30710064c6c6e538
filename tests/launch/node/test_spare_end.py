"""The end of a node that had a slot, lost it to a spare, and stands by while other nodes train the run."""

import pickle
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousState,
)

from holdfast.launch import torchrun
from holdfast.launch.exits import FOLDER_VARIABLE, RankRecord
from holdfast.launch.node.output import NodeEvents, RankOutput
from holdfast.launch.node.rendezvous import SealedBackend
from holdfast.launch.node.spare_rendezvous import NoSlotError, SpareRendezvousHandler, TrainedError, _JoinOp
from holdfast.launch.node.spot_notice import SpotNoticeWatch
from holdfast.launch.node.watchdog import Watchdog
from holdfast.spec import ExitCode
from tests.ports import LAUNCH_KEY

(KEY,) = LAUNCH_KEY.values()
RUN = "run"


def closed_state(*nodes: str, of: str = "redundancy_list") -> bytes:
    state = _RendezvousState()
    state.closed = True
    setattr(state, of, unseated := {_NodeDesc(name, 1, 0) for name in nodes})
    state.last_heartbeats = dict.fromkeys(unseated, datetime.now(UTC))
    return pickle.dumps(state)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("of", ["redundancy_list", "wait_list"])
def test_a_node_without_a_seat_asks_whether_the_run_is_trained_before_it_shows_that_it_has_noticed_the_end(
    of: str, trained: bool
) -> None:
    node, state = _NodeDesc("this", 1, 0), _RendezvousState()
    state.closed = True
    getattr(state, of).add(node)
    op, context = (
        _JoinOp(lambda: trained and node in getattr(state, of)),
        cast(_RendezvousContext, Context(node, state)),
    )
    assert op(context, 0.0) == _Action.KEEP_ALIVE
    assert not getattr(state, of)
    assert op.trained == trained
    assert op(context, 0.0) == _Action.ERROR_CLOSED
    assert op.trained == trained


@dataclass
class Context:
    """What an operation on the state reads."""

    node: _NodeDesc
    state: _RendezvousState
    settings: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_nodes=2))


@pytest.mark.parametrize("of", ["redundancy_list", "wait_list"])
def test_a_node_that_stands_by_keeps_the_store_until_the_other_spares_know_that_the_run_is_trained(of: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    gang = SealedBackend(store, RUN, KEY)
    assert gang.set_state(closed_state("another spare", of=of))
    store.set(f"holdfast.trained.{RUN}", "1")
    node = SpareRendezvousHandler.from_backend(RUN, store, SealedBackend(store, RUN, KEY), 2, 2)
    with pytest.raises(TrainedError):
        node.next_rendezvous()
    leaving = threading.Thread(target=node.shutdown)
    leaving.start()
    leaving.join(1.0)
    assert leaving.is_alive()
    known = gang.get_state()
    assert known is not None and gang.set_state(closed_state(), known[1])
    leaving.join(60)
    assert not leaving.is_alive()


@pytest.mark.parametrize(
    ("error", "expected"), [(TrainedError("trained"), ExitCode.OK), (NoSlotError("closed"), ExitCode.LOST_PEER)]
)
def test_ranks_that_lost_a_peer_do_not_fail_a_node_that_stands_by_while_the_run_is_trained(
    error: Exception, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    rank = RankRecord()
    rank.formed(1)
    rank.ended(ExitCode.LOST_PEER)
    with NodeEvents(None) as events, SpotNoticeWatch(events) as reclaim:
        output = RankOutput(None, tmp_path)
        watchdog = Watchdog(events, tmp_path, output.add, launch_key="")
        end = torchrun._End(tmp_path, watchdog, None, output, reclaim, torchrun._Leaving())
        assert end.come(*end.apart(error)) == expected
        output.close({})
