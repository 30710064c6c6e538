"""Rendezvous of a launch's nodes: torch's, without its open listeners and without its pickle.

torch's c10d rendezvous keeps its state in a TCPStore that listens on all interfaces and authenticates no client, and
unpickles that state every second. `install` replaces its backends in this process:

- One node: nothing listens. torchrun's own store is in its memory; the ranks meet in a file in a private folder.
- Several nodes: the store listens only on the job's address. The state of an elastic gang is JSON, sealed with the key
  of the launch. Anything else written over it is replaced by the last sealed state that this node knows.

Any client of a TCPStore can still delete keys and so end the launch (docs/security.md).
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field
from torch.distributed import HashStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT, C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    Token,
    _NodeDesc,
    _RendezvousState,
    create_handler,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from holdfast.launch.device import MEETING_VARIABLE, STORE_TIMEOUT, tcp_store
from holdfast.runtime.sealing import seal, unseal

log = logging.getLogger("holdfast.launch")

MAX_STATE_BYTES = 4 << 20  # of 10,000 nodes
MAX_NODES = 16_384
LOOPBACK = "127.0.0.1"
_READ_SECONDS = 60  # torch's default


def install(folder: Path, key: str, *, alone: bool) -> None:
    """Use only these rendezvous in this process. `alone`: the launch has one node, whose ranks meet in `folder`. `key`:
    that of the launch, if it has several nodes."""

    def static(params: RendezvousParameters) -> RendezvousHandler:
        return OneNode(params, folder) if alone else _static(params)

    def c10d(params: RendezvousParameters) -> RendezvousHandler:
        return OneNode(params, folder) if alone else _elastic(params, key)

    rendezvous_handler_registry._registry = {"static": static, "c10d": c10d}
    # torch searches all loaded modules for the caller of each operation, only to record it, between a read of the state
    # and the write that depends on it. On a busy machine that takes seconds, and another node is first again and again.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""  # noqa: ARG005


class OneNode(RendezvousHandler):
    """The rendezvous of a launch with a single node."""

    def __init__(self, params: RendezvousParameters, folder: Path) -> None:
        self._backend, self._run_id, self._folder = params.backend, params.run_id, folder
        self._rounds = 0
        # A file that cannot be locked holds no store. Then a port does, for this machine's users only.
        self._store = None if can_lock(folder) else tcp_store(LOOPBACK, 0, hosts=True, timeout=STORE_TIMEOUT)

    def get_backend(self) -> str:
        """See base class."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return self._store is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        self._rounds += 1
        if self._store is not None:
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))
        os.environ[MEETING_VARIABLE] = str(self._folder / f"meeting-{self._rounds}")  # inherited by the ranks
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, 0))

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        return True


class _Static(StaticTCPRendezvous):
    """torch's rendezvous of a fixed number of nodes, with a store that listens on the job's address."""

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        if self._store is None:  # otherwise it has met before
            self._store: Store | None = tcp_store(
                self.master_addr, self.master_port, hosts=self.rank == 0, timeout=self.timeout, world=self.world_size
            )
        return super().next_rendezvous()


def can_lock(folder: Path) -> bool:
    """Whether files in a folder can be locked."""
    try:
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _static(params: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(params.endpoint.strip(), -1)
    timeout = int(params.config.get("timeout", 600))
    return _Static(address, port, cast(int, params.config["rank"]), params.max_nodes, params.run_id, timeout)


def _elastic(params: RendezvousParameters, key: str) -> RendezvousHandler:
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    timeout = timedelta(seconds=cast(int, params.get_as_int("read_timeout", _READ_SECONDS)))
    hosts = params.get_as_bool("is_host")
    store: Store
    try:
        if hosts is not None:
            store = tcp_store(host, port, hosts=hosts, timeout=timeout)
        else:
            store = _guessed_store(host, port, timeout)
    except (ValueError, RuntimeError, TimeoutError, OSError) as error:
        raise RendezvousConnectionError(f"the nodes cannot meet at {host}:{port}: {error}") from error
    handler = create_handler(store, SealedBackend(store, params.run_id, key), params)
    handler._create_tcp_store_server = _bound_server  # type: ignore[method-assign,assignment]
    return handler


def _bound_server(address: str, port: int) -> TCPStore:
    """Replacement of torch's function, for the ranks of nodes that never change."""
    return tcp_store(address, port, hosts=True, timeout=STORE_TIMEOUT)


def _guessed_store(host: str, port: int, timeout: timedelta) -> Store:
    """A store whose host is not configured: the first node with this address hosts it."""
    if _matches_machine_hostname(host):
        try:
            return tcp_store(host, port, hosts=True, timeout=timeout)
        except (RuntimeError, OSError):  # another process of this machine was first
            pass
    return tcp_store(host, port, hosts=False, timeout=timeout)


_Node = tuple[str, int, int]  # address, process id, number


class _State(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """torch's `_RendezvousState`, as it is stored."""

    version: int = Field(ge=1)  # grows with each state: an old one that is written again is rejected
    round: int = Field(ge=0)
    complete: bool
    deadline: float | None  # unix seconds
    closed: bool
    participants: list[tuple[_Node, int]] = Field(max_length=MAX_NODES)
    wait_list: list[_Node] = Field(max_length=MAX_NODES)
    redundancy_list: list[_Node] = Field(max_length=MAX_NODES)
    last_heartbeats: list[tuple[_Node, float]] = Field(max_length=MAX_NODES)

    @classmethod
    def of(cls, state: _RendezvousState, version: int) -> _State:
        """The stored form of a state."""
        return cls(
            version=version,
            round=state.round,
            complete=state.complete,
            deadline=None if state.deadline is None else state.deadline.timestamp(),
            closed=state.closed,
            participants=[(_packed(node), rank) for node, rank in state.participants.items()],
            wait_list=[_packed(node) for node in sorted(state.wait_list)],
            redundancy_list=[_packed(node) for node in sorted(state.redundancy_list)],
            last_heartbeats=[(_packed(node), time.timestamp()) for node, time in state.last_heartbeats.items()],
        )

    @property
    def state(self) -> _RendezvousState:
        """The state in torch's form. Raises OverflowError, ValueError and OSError for an invalid time."""
        state = _RendezvousState()
        state.round, state.complete, state.closed = self.round, self.complete, self.closed
        state.deadline = None if self.deadline is None else datetime.fromtimestamp(self.deadline, UTC)
        state.participants = {_NodeDesc(*node): rank for node, rank in self.participants}
        state.wait_list = {_NodeDesc(*node) for node in self.wait_list}
        state.redundancy_list = {_NodeDesc(*node) for node in self.redundancy_list}
        state.last_heartbeats = {
            _NodeDesc(*node): datetime.fromtimestamp(moment, UTC) for node, moment in self.last_heartbeats
        }
        return state


def _packed(node: _NodeDesc) -> _Node:
    return node.addr, node.pid, node.local_id


class SealedBackend(C10dRendezvousBackend):
    """Backend that keeps the state of an elastic gang as sealed JSON. torch's holder of the state uses pickle, and only
    gets what this process has pickled itself."""

    def __init__(self, store: Store, run_id: str, key: str) -> None:
        self._launch_key, self._purpose = key, f"rendezvous {run_id}"
        self._newest: _State | None = None
        super().__init__(store, run_id)

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        return self._believed(super().get_state)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        version = 1 if self._newest is None else self._newest.version + 1
        offered = _State.of(pickle.loads(state), version)  # noqa: S301 - this process's own: see the class
        sealed = self._sealed(offered)
        was_set = False

        def put() -> tuple[bytes, Token] | None:
            nonlocal was_set
            stored = super(SealedBackend, self).set_state(sealed, token)
            was_set = stored is not None and stored[2]
            return None if stored is None else stored[:2]

        believed = self._believed(put)
        return None if believed is None else (*believed, was_set)

    def _believed(self, ask: Any) -> tuple[bytes, Token] | None:
        """The state in the store, if a process of this launch wrote it and it is not older than the last known state.
        Otherwise the last known state, which is written over it."""
        try:
            answer = ask()
            newest = self._newest
            if answer is None and newest is None:
                return None
            if answer is None:
                raise ValueError("no state")
            stored = _State.model_validate_json(unseal(self._launch_key, self._purpose, answer[0], MAX_STATE_BYTES))
            if newest is not None and stored.version < newest.version:
                raise ValueError(f"version {stored.version} of the state, after version {newest.version}")
            state = stored.state
            self._newest = stored
            return pickle.dumps(state), answer[1]
        except (ValueError, OverflowError, OSError, RendezvousStateError) as error:
            log.warning(
                "the rendezvous holds what no node of this launch has written, which is replaced: %.200s", error
            )
            return self._restored()

    def _restored(self) -> tuple[bytes, Token] | None:
        if self._newest is None:
            self._call_store("set", self._key, self._NULL_SENTINEL)
            return None
        text = b64encode(self._sealed(self._newest)).decode()
        self._call_store("set", self._key, text)
        return pickle.dumps(self._newest.state), text.encode()

    def _sealed(self, state: _State) -> bytes:
        return seal(self._launch_key, self._purpose, state.model_dump_json().encode())
