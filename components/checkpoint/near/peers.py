"""Copies on another node: what a node keeps in memory is sent to its neighbour, and a new gang fetches what it lacks.

One listener a node. A connection begins with a challenge that only who knows the node's token can answer; requests are
bounded JSON, bytes follow as they are, and nothing outside of the run's near folders is read or written. What arrives
is believed no more than what lies on a disk: its reader compares digests.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field

from holdfast.components.checkpoint.index import MAX_INDEX_BYTES
from holdfast.components.checkpoint.near.keeper import Step, prune
from holdfast.components.checkpoint.near.record import record_key
from holdfast.components.checkpoint.near.tier import Tier, require_room, touch
from holdfast.components.checkpoint.share import writer_name
from holdfast.components.runtime.gang import Gang
from holdfast.components.spec.errors import HoldfastError, MissingError, StoreUnreachableError
from holdfast.components.store import layout

log = logging.getLogger("holdfast.checkpoint")

PAUSE_SECONDS = 30.0  # after a step that could not be sent
SECONDS = 30.0  # that one read or write of a connection may take
MAX_REQUEST = 1 << 16  # bytes
CHUNK = 1 << 20
_CONNECTIONS = 64  # served at once
_POLL_SECONDS = 0.2
_LENGTH = struct.Struct("<I")
_CHALLENGE = 32  # bytes


class Endpoint(BaseModel):
    """Where a node listens, and what opens it."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    host: str
    port: int = Field(ge=1, lt=1 << 16)
    token: str = Field(repr=False)


def listen() -> tuple[socket.socket, Endpoint]:
    """A listener on the interface by which this node meets the others, and how it is reached. Raises OSError."""
    host = _own_address()
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64)
    return listener, Endpoint(host=host, port=listener.getsockname()[1], token=secrets.token_hex(32))


def _own_address() -> str:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for address in psutil.net_if_addrs().get(name, []):
        if address.family == socket.AF_INET:
            return str(address.address)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or 0) or 9
    family, kind, *_, target = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing: the kernel says from which address it would
        probe.connect(target)
        return str(probe.getsockname()[0])


class Server:
    """Serves what a node keeps of a run, and takes what its neighbour sends. Its threads end with `close`, which leaves
    the listener open, or with the process."""

    def __init__(self, listener: socket.socket, token: str, run_id: str, tiers: Sequence[Tier]) -> None:
        self._listener, self._token, self._run_id = listener, token.encode(), run_id
        self._tiers = {tier.name: tier for tier in tiers}
        self._room = threading.Semaphore(_CONNECTIONS)
        self._closed = False
        self._known = re.compile(rf"^runs/{re.escape(run_id)}/(indexes/[0-9-]+/[0-9a-z.]+|packs/[0-9a-f-]+\.pack)$")
        self._thread = threading.Thread(target=self._accept, name="near server", daemon=True)
        self._thread.start()

    def close(self, *, listener: bool = False) -> None:
        """Serve nobody any more; with `listener`, nobody else does, either."""
        self._closed = True
        self._thread.join()
        if listener:
            self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], _POLL_SECONDS)[0]:
                continue
            try:
                self._listener.setblocking(False)  # another process that has it may be faster
                end, _ = self._listener.accept()
            except OSError:
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._follow, args=(end,), name="near connection", daemon=True).start()
            else:
                end.close()

    def _follow(self, end: socket.socket) -> None:
        try:
            with end:
                end.settimeout(SECONDS)
                challenge = secrets.token_bytes(_CHALLENGE)
                end.sendall(challenge)
                if not hmac.compare_digest(_received(end, _CHALLENGE), _answer(self._token, challenge)):
                    log.warning("somebody without the token asked for copies of run %s", self._run_id)
                    return
                while not self._closed:
                    end.settimeout(None)  # until it asks, or ends
                    request = _message(end)
                    end.settimeout(SECONDS)
                    self._serve(end, request)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            log.debug("a connection for near copies has ended: %s", error)
        finally:
            self._room.release()

    def _serve(self, end: socket.socket, request: dict[str, Any]) -> None:
        writer, key, tier = int(request["writer"]), str(request["key"]), self._tiers.get(request["tier"])
        if not self._known.match(key) or writer < 0:
            raise ValueError(f"{key[:200]!r} is no object of a near step")
        try:
            if tier is None:
                raise MissingError(f"this node has no {request['tier']} tier")
            if request["op"] == "get":
                store = tier.store(writer)
                length = request["length"]
                data = store.get(key) if length is None else store.get(key, int(request["start"]), int(length))
                _say(end, {"size": len(data)})
                end.sendall(data)
                return
            self._take(end, tier, writer, key, int(request["size"]))
            _say(end, {})
        except HoldfastError as error:
            _say(end, {"error": str(error)[:1000], "missing": isinstance(error, MissingError)})

    def _take(self, end: socket.socket, tier: Tier, writer: int, key: str, size: int) -> None:
        """Keep an object of another node. The index is the last of a step: then what is too old goes."""
        if not 0 <= size <= MAX_INDEX_BYTES:
            raise ValueError(f"{size} bytes")
        rest = size

        def content() -> Iterator[bytes]:
            nonlocal rest
            while rest:
                part = _received(end, min(CHUNK, rest))
                rest -= len(part)
                yield part

        try:
            require_room(tier, size)
            tier.store(writer).put_stream(key, size, content)
        except HoldfastError:
            for _ in content():  # what is on its way is read, and forgotten
                pass
            raise
        touch(tier.folder)
        if key.endswith(f"/{writer_name(writer)}.idx"):
            prune(tier.store(writer), self._run_id, writer)


class Nodes:
    """The nodes of a gang, and how each is reached. On one rank."""

    def __init__(self, gang: Gang, tiers: Sequence[Tier]) -> None:
        """A collective call. `tiers`: those of this node, which is known by its name and their folders."""
        self._gang = gang
        self.here = f"{socket.gethostname()} {' '.join(tier.folder for tier in tiers)}"
        self.names = gang.all_gather(self.here, str)  # by rank
        self.leads = self.names.index(self.here) == gang.rank  # this rank is the first one of its node
        self._listener: socket.socket | None = None
        own: Endpoint | None = None
        if self.leads and len(set(self.names)) > 1:
            try:
                self._listener, own = listen()
            except (OSError, ValueError) as error:
                log.warning("no other node can have copies of this one, or send any: %s", error)
        self._own = own
        # By rank; of the first one of each node.
        self.endpoints: list[Endpoint | None] = gang.all_gather(own, Endpoint | None)

    @property
    def neighbour(self) -> Endpoint | None:
        """The next node around the ring that listens; None where there is no other one."""
        ring = list(dict.fromkeys(self.names))
        at = ring.index(self.here)
        for name in [*ring[at + 1 :], *ring[:at]]:
            if (endpoint := self.endpoints[self.names.index(name)]) is not None:
                return endpoint
        return None

    @contextmanager
    def served(self, run_id: str, tiers: Sequence[Tier]) -> Iterator[None]:
        """Other nodes may read what this one keeps, until all ranks have come to the end of the body."""
        server = None
        if self._listener is not None and self._own is not None:
            server = Server(self._listener, self._own.token, run_id, tiers)
        try:
            yield
            self._gang.barrier()
        finally:
            if server is not None:
                server.close()

    def handed_over(self) -> tuple[socket.socket, str] | None:
        """The listener and its token, for whoever serves from now on; None on most ranks, and from the second call."""
        listener, self._listener = self._listener, None
        return None if listener is None or self._own is None else (listener, self._own.token)


class Remote:
    """One writer's part on another node: see `Source`. Several threads may read."""

    def __init__(self, endpoint: Endpoint, tier: str, writer: int) -> None:
        self._endpoint, self._tier, self._writer = endpoint, tier, writer
        self._idle: SimpleQueue[socket.socket] = SimpleQueue()

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See Store. Raises MissingError, StoreUnreachableError."""
        with self._connected() as end:
            self._ask(end, {"op": "get", "key": key, "start": start, "length": length})
            told, data = _message(end), b""
            if "error" not in told:
                size = int(told["size"])
                if size > MAX_INDEX_BYTES or length not in (None, size):
                    raise ValueError(f"{key}: {size} bytes came, and {length} were asked for")
                data = _received(end, size)
        self._require_done(told)
        return data

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """See Store."""
        target.cast("B")[:] = self.get(key, start, target.nbytes)

    def put(self, key: str, data: bytes) -> None:
        """Have an object kept there. Raises StoreUnreachableError."""
        with self._connected() as end:
            self._ask(end, {"op": "put", "key": key, "size": len(data)})
            end.sendall(data)
            told = _message(end)
        self._require_done(told)

    def close(self) -> None:
        """End its connections."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()

    def _ask(self, end: socket.socket, request: dict[str, Any]) -> None:
        _say(end, {**request, "tier": self._tier, "writer": self._writer})

    def _require_done(self, told: dict[str, Any]) -> None:
        if "error" in told:
            kind = MissingError if told.get("missing") else StoreUnreachableError
            raise kind(f"{self._endpoint.host}: {told['error']}")

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        """A connection, which is kept if all goes well."""
        try:
            try:
                end = self._idle.get_nowait()
            except Empty:
                end = self._opened()
            try:
                yield end
            except BaseException:
                end.close()
                raise
            self._idle.put(end)
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise StoreUnreachableError(
                f"the copies on {self._endpoint.host}:{self._endpoint.port} cannot be reached: {error}"
            ) from error

    def _opened(self) -> socket.socket:
        end = socket.create_connection((self._endpoint.host, self._endpoint.port), timeout=SECONDS)
        try:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.sendall(_answer(self._endpoint.token.encode(), _received(end, _CHALLENGE)))
        except BaseException:
            end.close()
            raise
        return end


class Neighbour:
    """Sends what one writer keeps to another node, step by step. What fails is said, and tried again after a while."""

    def __init__(self, endpoint: Endpoint, tier: Tier, run_id: str, writer: int) -> None:
        self._remote, self._tier, self._run_id, self._writer = Remote(endpoint, tier.name, writer), tier, run_id, writer
        self._not_before = 0.0

    def send(self, step: Step) -> None:
        """Have a step that is whole here kept there as well: packs and record first, the index last."""
        if time.monotonic() < self._not_before:
            return
        store = self._tier.store(self._writer)
        index = f"{layout.indexes(self._run_id, *step)}{writer_name(self._writer)}.idx"
        keys = [info.key for info in store.list(f"{layout.packs(self._run_id)}{step[0]:06d}-{step[1]:09d}-")]
        if store.stat(record := record_key(self._run_id, *step)) is not None:
            keys.append(record)
        try:
            for key in [*keys, index]:
                self._remote.put(key, store.get(key))
        except HoldfastError as error:
            self._not_before = time.monotonic() + PAUSE_SECONDS
            log.warning("step %d of writer %d is on this node alone: %s", step[1], self._writer, error)


def _answer(token: bytes, challenge: bytes) -> bytes:
    return hmac.digest(token, challenge, "sha256")


def _say(end: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    if len(data) > MAX_REQUEST:
        raise ValueError(f"a message of {len(data)} bytes")
    end.sendall(_LENGTH.pack(len(data)) + data)


def _message(end: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_received(end, _LENGTH.size))
    if length > MAX_REQUEST:
        raise ValueError(f"a message of {length} bytes")
    told = json.loads(_received(end, length))
    if not isinstance(told, dict):
        raise TypeError("a message that is no object")
    return told


def _received(end: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if not (taken := end.recv_into(view)):
            raise EOFError("the other end has gone")
        view = view[taken:]
    return bytes(data)
