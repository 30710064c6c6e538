"""Rendezvous of nodes: a stranger's data in their store is never executed, and does not replace their state."""

import base64
import inspect
import os
import pickle
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from holdfast.launch.device import MEETING_VARIABLE
from holdfast.launch.node import rendezvous
from holdfast.launch.node.rendezvous import SealedBackend
from holdfast.runtime.sealing import seal
from tests.ports import LAUNCH_KEY, free_port
from tests.whole.attacks import Payload

(KEY,) = LAUNCH_KEY.values()
RUN = "run"
STATE_KEY = f"torch.rendezvous.{RUN}"


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rendezvous_handler_registry, "_registry", {})
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", dynamic_rendezvous.get_method_name)
    return rendezvous_handler_registry


def state(*nodes: str) -> _RendezvousState:
    new_state = _RendezvousState()
    new_state.participants = {_NodeDesc(name, 1, 0): rank for rank, name in enumerate(nodes)}
    return new_state


def participants(answer: Any) -> list[str]:
    return [node.addr for node in pickle.loads(answer[0]).participants]


def write(backend: SealedBackend, *nodes: str) -> None:
    current = backend.get_state()
    answer = backend.set_state(pickle.dumps(state(*nodes)), current[1] if current else None)
    assert answer is not None and answer[2]


def test_the_state_that_one_node_writes_is_the_state_that_another_reads(store: TCPStore) -> None:
    first, second = SealedBackend(store, RUN, KEY), SealedBackend(store, RUN, KEY)
    assert second.get_state() is None
    write(first, "a")
    write(second, "a", "b")
    assert participants(first.get_state()) == ["a", "b"]
    stale = first.set_state(pickle.dumps(state("c")), b"an older token")
    assert stale is not None and not stale[2] and participants(stale) == ["a", "b"]
    assert b"pickle" not in store.get(STATE_KEY) and b'"version":' in base64.b64decode(store.get(STATE_KEY))


def sealed(body: bytes, key: str = KEY) -> str:
    return base64.b64encode(seal(key, f"rendezvous {RUN}", body)).decode()


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(lambda mark: base64.b64encode(pickle.dumps(Payload(mark))).decode(), id="a pickle"),
        pytest.param(lambda mark: sealed(b"{}", "another key"), id="another key"),
        pytest.param(lambda mark: sealed(b'{"version": 1}'), id="no state"),
        pytest.param(lambda mark: sealed(b"[" * 100_000), id="nested"),
        pytest.param(lambda mark: base64.b64encode(b"x" * 5_000_000).decode(), id="too long"),
        pytest.param(lambda mark: "not base64", id="not base64"),
        pytest.param(lambda mark: "", id="empty"),
        pytest.param(lambda mark: SealedBackend._NULL_SENTINEL, id="as if there were no state"),
    ],
)
def test_a_forged_rendezvous_state_is_not_executed_and_is_replaced_by_the_known_one(
    written: Any, store: TCPStore, tmp_path: Path
) -> None:
    node, mark = SealedBackend(store, RUN, KEY), tmp_path / "executed"
    write(node, "a", "b")
    store.set(STATE_KEY, written(mark))
    assert participants(node.get_state()) == ["a", "b"]
    write(node, "a")
    assert participants(SealedBackend(store, RUN, KEY).get_state()) == ["a"]
    assert not mark.exists()


def test_an_old_state_that_is_written_again_is_not_believed(store: TCPStore) -> None:
    node = SealedBackend(store, RUN, KEY)
    write(node, "a")
    old = store.get(STATE_KEY)
    write(node, "a", "b")
    store.set(STATE_KEY, old.decode())
    assert participants(node.get_state()) == ["a", "b"]


def test_a_new_node_overwrites_a_forged_rendezvous_state(store: TCPStore, tmp_path: Path) -> None:
    store.set(STATE_KEY, base64.b64encode(pickle.dumps(Payload(tmp_path / "executed"))).decode())
    node = SealedBackend(store, RUN, KEY)
    assert node.get_state() is None
    write(node, "a")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_one_node_listens_nowhere_and_names_a_file_to_its_ranks(
    backend: str, registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MEETING_VARIABLE, raising=False)
    monkeypatch.setattr(socket.socket, "listen", lambda *_: pytest.fail("it listens"))
    rendezvous.install(tmp_path, "", alone=True)
    handler = registry.create_handler(RendezvousParameters(backend, "127.0.0.1:29400", RUN, 1, 1, rank=0))
    files = []
    for _ in range(2):  # each round of ranks has a new rendezvous
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        files.append(os.environ[MEETING_VARIABLE])
    assert not handler.use_agent_store
    assert len(set(files)) == 2 and all(Path(file).parent == tmp_path for file in files)


def test_where_files_cannot_be_locked_the_ranks_meet_on_the_loopback_address(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "can_lock", lambda folder: False)
    rendezvous.install(tmp_path, "", alone=True)
    handler = registry.create_handler(RendezvousParameters("static", "127.0.0.1:29400", RUN, 1, 1, rank=0))
    meeting = handler.next_rendezvous().bootstrap_store_info
    assert handler.use_agent_store
    assert meeting.master_addr == "127.0.0.1"
    TCPStore("127.0.0.1", meeting.master_port, is_master=False, timeout=timedelta(seconds=10)).set("a", "b")


def test_no_other_rendezvous_can_be_chosen(registry: Any, tmp_path: Path) -> None:
    rendezvous.install(tmp_path, KEY, alone=False)
    with pytest.raises(ValueError, match="not registered"):
        registry.create_handler(RendezvousParameters("etcd-v2", "127.0.0.1:1", RUN, 1, 2))


def test_no_operation_of_an_elastic_gang_searches_the_modules_for_its_caller(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous.install(tmp_path, KEY, alone=False)
    replacement, names, searches = dynamic_rendezvous.get_method_name, list[str](), list[str]()

    def named(depth: int = 2) -> str:
        names.append(replacement(depth))
        return names[-1]

    def searched(*_: object) -> list[inspect.FrameInfo]:
        searches.append("inspect.stack")
        return []

    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", named)
    monkeypatch.setattr(inspect, "stack", searched)
    endpoint = f"127.0.0.1:{free_port()}"
    handler = registry.create_handler(
        RendezvousParameters("c10d", endpoint, RUN, 1, 1, local_addr="127.0.0.1", is_host=True)
    )
    handler.next_rendezvous()
    assert handler.shutdown()
    assert names, "torch no longer calls the function that `install` replaces: find what it calls now"
    assert set(names) == {""} and not searches
